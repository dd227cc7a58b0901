"""Intervals of speed-ups against distributions that are known."""

import numpy as np
import pytest
from busy_machine import measured_passes
from scipy import stats
from volume import volume

from rayspec.statistics import (
    Interval,
    Pair,
    looks,
    paired_speedup,
    ratio_interval,
    sequential_confidence,
    throughput_ratio,
    typical_pass,
)

SIMULATIONS = volume(300, 150)  # of a rule that covers in 90%, 150 find in 98 of 100 that it covers in less than 95%
# The chance that a rule which covers in 95% is seen to cover less often than this is 1%.
SEEN_95 = float(stats.binom.ppf(0.01, SIMULATIONS, 0.95)) / SIMULATIONS


def covers(interval: Interval, value: float) -> bool:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low <= value <= interval.high


def test_value_is_the_ratio_of_pooled_throughputs() -> None:
    r = throughput_ratio([10, 30], [1, 2], [10, 30], [2, 6])
    assert r.value == pytest.approx((40 / 3) / (40 / 8))
    assert r.low is None  # two blocks say nothing about their spread
    assert r.high is None
    assert r.relative_width == float("inf")


def test_a_constant_ratio_has_no_width() -> None:
    walls = np.arange(1.0, 9.0)
    r = throughput_ratio(walls, walls / 1.5, walls, walls)
    assert [r.value, r.low, r.high] == pytest.approx([1.5, 1.5, 1.5])
    assert r.relative_width == pytest.approx(0)


def test_equal_weights_give_nearly_student_s_interval() -> None:
    """With blocks of equal tokens and a constant baseline the ratio is one over the mean of the walls."""
    walls = np.random.default_rng(0).normal(1, 0.02, 12)
    r = throughput_ratio(np.ones(12), walls, np.ones(12), np.ones(12))
    log_half = stats.t.ppf(0.975, 11) * walls.std(ddof=1) / np.sqrt(12) / walls.mean()
    assert r.value == pytest.approx(1 / walls.mean())
    assert [r.low, r.high] == pytest.approx([r.value * np.exp(-log_half), r.value * np.exp(log_half)], rel=1e-3)


def test_pairing_removes_what_a_block_shares() -> None:
    rng = np.random.default_rng(0)
    tokens, window = rng.integers(100, 400, 12).astype(float), np.exp(rng.normal(0, 1, 12))
    base = tokens * window  # windows differ by a factor of several ...
    candidate = base / 1.3 * np.exp(rng.normal(0, 0.01, 12))  # ... and the ratio within one by a percent
    r = throughput_ratio(tokens, candidate, tokens, base)
    assert covers(r, 1.3)
    assert r.relative_width < 0.05


def test_one_pass_is_its_own_typical_pass_and_a_burst_does_not_count() -> None:
    assert typical_pass([Pair(7, 2, 9, 3)]) == pytest.approx((7, 2, 9, 3))
    calm = Pair(100, 1.0, 100, 1.3)
    burst = Pair(100, 9.0, 100, 1.3)
    assert typical_pass([calm, burst, calm]) == pytest.approx(calm)
    slower_window = Pair(100, 2.0, 100, 2.6)  # both, so that the ratio stands
    t = typical_pass([calm, slower_window, slower_window])
    assert (t.tokens / t.seconds) / (t.base_tokens / t.base_seconds) == pytest.approx(1.3)


def test_prompts_are_the_clusters() -> None:
    """More passes over four blocks that differ in their speed-up do not make its interval any narrower."""
    passes = [[Pair(100, 100 / s, 100, 100)] for s in (1.0, 1.1, 1.3, 1.5)]
    once, often = paired_speedup(passes), paired_speedup([p * 50 for p in passes])
    assert once.relative_width == pytest.approx(often.relative_width)


def test_looks_grow_and_end() -> None:
    assert looks(1, 1) == [1]
    assert looks(1, 10) == [1, 2, 3, 5, 8, 10]
    assert looks(3, 20) == [3, 5, 8, 12, 18, 20]
    assert looks(4, 5) == [4, 5]


def test_levels_of_looks() -> None:
    assert sequential_confidence(0.95, 1) == pytest.approx(0.95)
    assert sequential_confidence(0.95, 5) == pytest.approx(0.99)


@pytest.mark.parametrize("num_blocks", [4, 8, 16])
def test_interval_covers_the_true_ratio_as_often_as_it_says(num_blocks: int) -> None:
    """4 is the fewest that give an interval; the percentile interval would cover in 88% there."""
    rng, hits = np.random.default_rng(1), 0
    for i in range(SIMULATIONS):
        tokens = rng.integers(150, 260, num_blocks).astype(float)
        shared = tokens * np.exp(rng.normal(0, 0.3, num_blocks))
        base = shared * np.exp(rng.normal(0, 0.08, num_blocks))
        candidate = shared * np.exp(rng.normal(0, 0.08, num_blocks)) / 1.3
        hits += covers(throughput_ratio(tokens, candidate, tokens, base, resamples=499, seed=i), 1.3)
    assert SEEN_95 <= hits / SIMULATIONS < 0.99


def sequential(rng: np.random.Generator, *, blocks: int, width: float, speedup: float, **noise: float) -> Interval:
    """The interval at which passes end, of 3 to 20."""
    passes = measured_passes(rng, blocks=blocks, passes=20, speedup=speedup, **noise)
    confidence = sequential_confidence(0.95, len(looks(3, 20)))
    for number in looks(3, 20):
        by_block = list(zip(*passes[:number], strict=True))
        interval = paired_speedup(by_block, confidence=confidence, resamples=199)
        if interval.relative_width <= width:
            break
    return interval


NOISE: dict[str, dict[str, float]] = {"busy": {}, "drifting": {"bursts": 0.0}, "calm": {"bursts": 0.0, "drift": 0.03}}


@pytest.mark.parametrize(
    ("noise", "blocks", "width"),
    [("busy", 6, 0.1), ("busy", 10, 0.05), ("drifting", 8, 0.08), ("calm", 10, 0.03)],
)
def test_a_a_covers_one_where_passes_end_when_the_interval_is_narrow(noise: str, blocks: int, width: float) -> None:
    hits = 0
    for i in range(SIMULATIONS):
        rng = np.random.default_rng([2, i])
        hits += covers(sequential(rng, blocks=blocks, width=width, speedup=1, **NOISE[noise]), 1)
    assert hits / SIMULATIONS >= 0.95


def test_without_the_correction_for_looks_it_would_not() -> None:
    """Negative control: looking after every pass at plain 95% intervals covers too seldom."""
    hits = 0
    for i in range(SIMULATIONS):
        rng = np.random.default_rng([4, i])
        passes = measured_passes(rng, blocks=8, passes=12, speedup=1, **NOISE["drifting"])
        for number in range(1, 13):
            interval = paired_speedup(list(zip(*passes[:number], strict=True)), resamples=199)
            if interval.relative_width <= 0.07:
                break
        hits += covers(interval, 1)
    assert hits / SIMULATIONS < 0.92


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_ten_percent_slow_down_is_found(noise: dict[str, float]) -> None:
    found = 0
    for i in range(100):
        r = sequential(np.random.default_rng([3, i]), blocks=10, width=0.08, speedup=1 / 1.1, **noise)
        assert r.high is not None
        found += r.high < 1
    assert found >= 95


def test_same_seed_same_interval() -> None:
    rng = np.random.default_rng(2)
    data = [rng.uniform(1, 2, 8) for _ in range(4)]
    assert throughput_ratio(*data, seed=5) == throughput_ratio(*data, seed=5)


def test_the_interval_of_a_ratio_covers_it_in_95_percent() -> None:
    """Prompts of unequal length, whose acceptance depends on their length."""
    rng = np.random.default_rng(0)
    truth, covered = [], 0
    for _ in range(1000):
        steps = rng.integers(5, 60, 20)
        accepted = rng.binomial(4 * steps, 0.3 + 0.005 * steps)
        truth.append((accepted.sum(), steps.sum()))
    ratio = sum(a for a, _ in truth) / sum(s for _, s in truth)
    rng = np.random.default_rng(1)
    for _ in range(1000):
        steps = rng.integers(5, 60, 20)
        interval = ratio_interval(rng.binomial(4 * steps, 0.3 + 0.005 * steps), steps)
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= ratio <= interval.high
    assert 920 <= covered <= 970
    assert ratio_interval([1, 2, 3], [2, 2, 2]) == Interval(value=1.0)  # too few to know their spread
