"""Confidence intervals of paired throughput ratios. B = prompt blocks.

Candidate and baseline answer the same block of prompts back to back, so one block carries what they share: its
prompts and its window of time (clock frequency, other load). The block is therefore what is resampled, in pairs; passes
over the same block are added up first, since they share their prompts. The statistic is the ratio of pooled
throughputs, sum(tokens) / sum(seconds), as it would be over one long run.

The interval is the bootstrap percentile interval at expanded level (Hesterberg 2015, "What teachers should know about
the bootstrap", section 4.3): with the few blocks of a sweep the plain percentile interval is too narrow by the factor
sqrt((B-1)/B) * z/t.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

MIN_BLOCKS = 4  # with fewer, even the expanded interval covers well below its level


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its confidence interval; None where there are too few blocks for one."""

    value: float
    low: float | None = None
    high: float | None = None


def expanded_level(confidence: float, num_blocks: int) -> float:
    """The nominal level at which a percentile interval of `num_blocks` blocks covers about `confidence`."""
    t = stats.t.ppf((1 + confidence) / 2, num_blocks - 1)
    return 1 - 2 * float(stats.norm.sf(t * np.sqrt(num_blocks / (num_blocks - 1))))


def _throughput_ratio(
    tokens_B: NDArray, wall_B: NDArray, base_tokens_B: NDArray, base_wall_B: NDArray, axis: int = -1
) -> NDArray:
    throughput = tokens_B.sum(axis=axis) / wall_B.sum(axis=axis)
    return throughput / (base_tokens_B.sum(axis=axis) / base_wall_B.sum(axis=axis))


def throughput_ratio(
    tokens_B: ArrayLike,
    wall_s_B: ArrayLike,
    base_tokens_B: ArrayLike,
    base_wall_s_B: ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> Interval:
    """Throughput of the candidate over that of the baseline; entry b of all four is the same prompt block."""
    data = tuple(np.asarray(x, dtype=float) for x in (tokens_B, wall_s_B, base_tokens_B, base_wall_s_B))
    num_blocks = len(data[0])
    assert num_blocks >= 1, "a ratio needs at least one block"
    assert all(len(x) == num_blocks for x in data), "candidate and baseline are paired block by block"
    tokens, wall, base_tokens, base_wall = data
    value = float(_throughput_ratio(tokens, wall, base_tokens, base_wall))
    if num_blocks < MIN_BLOCKS:
        return Interval(value=value)
    result = stats.bootstrap(
        data,
        _throughput_ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=1000,
        method="percentile",
        confidence_level=expanded_level(confidence, num_blocks),
        rng=np.random.default_rng(seed),
    )
    return Interval(value=value, low=float(result.confidence_interval.low), high=float(result.confidence_interval.high))
