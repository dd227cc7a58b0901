"""Intervals of throughput ratios against laws that are known."""

import numpy as np
import pytest

from rayspec.statistics import MIN_BLOCKS, expanded_level, throughput_ratio


def test_value_is_the_ratio_of_pooled_throughputs() -> None:
    r = throughput_ratio([10, 30], [1, 2], [10, 30], [2, 6])
    assert r.value == pytest.approx((40 / 3) / (40 / 8))
    assert r.low is None  # two blocks say nothing about their spread
    assert r.high is None


def test_a_constant_ratio_has_no_width() -> None:
    walls = np.arange(1.0, 9.0)
    r = throughput_ratio(walls, walls / 1.5, walls, walls)
    assert [r.value, r.low, r.high] == pytest.approx([1.5, 1.5, 1.5])


def test_pairing_removes_what_a_block_shares() -> None:
    rng = np.random.default_rng(0)
    tokens, window = rng.integers(100, 400, 12).astype(float), np.exp(rng.normal(0, 1, 12))
    base = tokens * window  # windows differ by a factor of several ...
    candidate = base / 1.3 * np.exp(rng.normal(0, 0.01, 12))  # ... and the ratio within one by a percent
    r = throughput_ratio(tokens, candidate, tokens, base)
    assert r.low is not None
    assert r.high is not None
    assert 1.27 < r.low < 1.3 < r.high < 1.33


@pytest.mark.parametrize("num_blocks", [8, 16])
def test_interval_covers_the_true_ratio_as_often_as_it_says(num_blocks: int) -> None:
    rng, trials, hits = np.random.default_rng(1), 300, 0
    for i in range(trials):
        tokens = rng.integers(150, 260, num_blocks).astype(float)
        shared = tokens * np.exp(rng.normal(0, 0.3, num_blocks))
        base = shared * np.exp(rng.normal(0, 0.08, num_blocks))
        candidate = shared * np.exp(rng.normal(0, 0.08, num_blocks)) / 1.3
        r = throughput_ratio(tokens, candidate, tokens, base, resamples=999, seed=i)
        assert r.low is not None
        assert r.high is not None
        hits += r.low <= 1.3 <= r.high
    # 95% of 300 with a binomial standard error of 1.3%; the plain percentile interval gives 0.89 at 8 blocks
    assert 0.91 <= hits / trials <= 0.985


def test_expanded_level_widens_few_blocks_and_vanishes_for_many() -> None:
    assert expanded_level(0.95, MIN_BLOCKS) > expanded_level(0.95, 8) > 0.95
    assert expanded_level(0.95, 10_000) == pytest.approx(0.95, abs=1e-4)


def test_same_seed_same_interval() -> None:
    rng = np.random.default_rng(2)
    data = [rng.uniform(1, 2, 8) for _ in range(4)]
    assert throughput_ratio(*data, seed=5) == throughput_ratio(*data, seed=5)
