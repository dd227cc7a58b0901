"""Wall times on a machine that others use too: slow drift, bursts of other load, and noise of each measurement."""

import numpy as np
from numpy.typing import NDArray

from rayspec.statistics import Pair


def slowdowns(rng: np.random.Generator, count: int, *, drift: float = 0.15, bursts: float = 0.03) -> NDArray:
    """log slow-down of `count` successive measurements.

    An AR(1) process of standard deviation `drift` that forgets within about 8 measurements, bursts that begin with
    probability `bursts`, last 3 measurements and slow them by 1.65 in the mean, and 5% of white noise.
    """
    forgotten = np.exp(-1 / 8)
    log_slow = np.empty(count)
    log_slow[0] = rng.normal(0, drift)
    steps = rng.normal(0, drift * np.sqrt(1 - forgotten**2), count)
    for i in range(1, count):
        log_slow[i] = forgotten * log_slow[i - 1] + steps[i]
    for start in np.flatnonzero(rng.random(count) < bursts):
        log_slow[start : start + 1 + rng.poisson(2)] += rng.exponential(0.5)
    return log_slow + rng.normal(0, 0.05, count)


def measured_passes(
    rng: np.random.Generator, *, blocks: int, passes: int, speedup: float, arms: int = 3, **noise: float
) -> list[list[Pair]]:
    """Passes [R][B] of a candidate of true `speedup` and its baseline: two of `arms` trials that take turns in each
    round, as in a sweep."""
    tokens_B = rng.integers(150, 260, blocks).astype(float)
    slow_Nm = slowdowns(rng, passes * blocks * arms, **noise).reshape(passes * blocks, arms)
    turns_N = np.arange(passes * blocks)
    base_N = np.exp(slow_Nm[turns_N, -turns_N % arms])
    own_N = np.exp(slow_Nm[turns_N, (1 - turns_N) % arms]) / speedup
    return [
        [Pair(t, t * own_N[r * blocks + b], t, t * base_N[r * blocks + b]) for b, t in enumerate(tokens_B)]
        for r in range(passes)
    ]
