"""Confidence intervals of paired speed-ups. B = prompt blocks, R = passes over a block.

Candidate and baseline answer the same block of prompts back to back, so one block carries what they share: its
prompts and its window of time (clock frequency, other load). The block is therefore what is resampled, in pairs: a
cluster of prompts with all passes over them. Passes are combined by the median of their paired ratios first, so that
other load that meets one of the two in one pass does not count. The statistic is the ratio of pooled throughputs,
sum(tokens) / sum(seconds), as it would be over one long run.

The interval is Student's t around the logarithm of the ratio with the bootstrap's standard error (Efron and Tibshirani
1993, "An introduction to the bootstrap", chapter 12), corrected by sqrt(B/(B-1)) as Hesterberg does (2015, "What
teachers should know about the bootstrap", section 4.3): the percentile interval of the few blocks of a sweep covers its
ratio too seldom. tests/rayspec/test_statistics.py holds it against noise that is correlated in time and has bursts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

MIN_BLOCKS = 4  # fewer say nothing about their spread
SPENDING_POWER = 1.5
CONFIDENCE, RESAMPLES = 0.95, 9999


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate and its confidence interval; None where there are too few blocks for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def relative_width(self) -> float:
        """high - low as a share of the value; infinite without an interval."""
        if self.low is None or self.high is None:
            return float("inf")
        return (self.high - self.low) / self.value


def beats_one(interval: Interval) -> bool | None:
    """True or False where the whole interval, in the two decimals that are shown, is above or below 1; else None."""
    if interval.low is None or interval.high is None:
        return None
    if round(interval.low, 2) > 1:
        return True
    return False if round(interval.high, 2) < 1 else None


class Pair(NamedTuple):
    """One pass of candidate and baseline over the same prompts: output tokens and the seconds that they took."""

    tokens: float
    seconds: float
    base_tokens: float
    base_seconds: float


def typical_pass(passes_R: Sequence[Pair]) -> Pair:
    """Mean tokens at the median seconds a token of the baseline and the median paired ratio; of one pass, itself."""
    tokens, seconds, base_tokens, base_seconds = np.asarray(passes_R, dtype=float).T
    ratio = float(np.median((tokens / seconds) / (base_tokens / base_seconds)))
    base_throughput = 1 / float(np.median(base_seconds / base_tokens))
    own, base = float(tokens.mean()), float(base_tokens.mean())
    return Pair(own, own / (ratio * base_throughput), base, base / base_throughput)


def paired_speedup(
    passes_BR: Sequence[Sequence[Pair]], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Throughput of the candidate over that of the baseline, from the passes over each prompt block."""
    return throughput_ratio(
        *zip(*(typical_pass(passes) for passes in passes_BR), strict=True),
        confidence=confidence,
        resamples=resamples,
        seed=seed,
    )


def _log_ratio(
    tokens_B: NDArray, seconds_B: NDArray, base_tokens_B: NDArray, base_seconds_B: NDArray, axis: int = -1
) -> NDArray:
    throughput = tokens_B.sum(axis=axis) / seconds_B.sum(axis=axis)
    return np.log(throughput / (base_tokens_B.sum(axis=axis) / base_seconds_B.sum(axis=axis)))


def throughput_ratio(
    tokens_B: ArrayLike,
    seconds_B: ArrayLike,
    base_tokens_B: ArrayLike,
    base_seconds_B: ArrayLike,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Throughput of the candidate over that of the baseline; entry b of all four is the same prompt block."""
    data = tuple(np.asarray(x, dtype=float) for x in (tokens_B, seconds_B, base_tokens_B, base_seconds_B))
    num_blocks = len(data[0])
    assert num_blocks >= 1, "a ratio needs at least one block"
    assert all(len(x) == num_blocks for x in data), "candidate and baseline are paired block by block"
    tokens, seconds, base_tokens, base_seconds = data
    log_value = float(_log_ratio(tokens, seconds, base_tokens, base_seconds))
    value = float(np.exp(log_value))
    if num_blocks < MIN_BLOCKS:
        return Interval(value=value)
    result = stats.bootstrap(
        data,
        _log_ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=1000,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    t = float(stats.t.ppf((1 + confidence) / 2, num_blocks - 1))
    half = t * float(np.sqrt(num_blocks / (num_blocks - 1)) * result.standard_error)
    return Interval(value=value, low=float(np.exp(log_value - half)), high=float(np.exp(log_value + half)))


def ratio_interval(tops_N: ArrayLike, bottoms_N: ArrayLike, *, confidence: float = CONFIDENCE) -> Interval:
    """sum(tops) / sum(bottoms) of independent clusters (prompts), with Student's t around the linearised ratio.

    Cochran 1977, "Sampling techniques", chapter 6.
    """
    tops, bottoms = np.asarray(tops_N, dtype=float), np.asarray(bottoms_N, dtype=float)
    value, n = float(tops.sum() / bottoms.sum()), len(tops)
    if n < MIN_BLOCKS:
        return Interval(value=value)
    error = float(np.sqrt(n / (n - 1) * ((tops - value * bottoms) ** 2).sum()) / bottoms.sum())
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * error
    return Interval(value=value, low=value - half, high=value + half)


def looks(first: int, last: int) -> list[int]:
    """After how many passes one looks at the interval: from `first` on, at least half as many again each time."""
    found = [first]
    while found[-1] < last:
        found.append(min(last, max(found[-1] + 1, -(-found[-1] * 3 // 2))))
    return found


def sequential_confidence(confidence: float, num_looks: int) -> float:
    """The level of each of `num_looks` intervals such that the one that is stopped at covers with `confidence`.

    Whoever stops at the first interval that is narrow enough prefers those that are too narrow by chance. Bonferroni:
    all of them together cover as often as one is asked to, whatever the rule to stop.
    """
    return 1 - (1 - confidence) / num_looks


def error_spent(share: float) -> float:
    """The part (0..1) of an error rate that all looks may have spent at this share (0..1) of the time: most of it late,
    by the power family of Kim and DeMets (1987, Biometrika 74)."""
    return min(1.0, share) ** SPENDING_POWER
