"""Bounds of a shift by Wilcoxon's signed ranks.

Hollander, Wolfe and Chicken 2014, "Nonparametric statistical methods", sections 3.1 to 3.3: the estimate is the median
of the Walsh averages (x_i + x_j) / 2, i <= j (Hodges and Lehmann), and its bounds are order statistics of them.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

EXACT_UP_TO = 200  # observations; beyond, the normal approximation differs in no digit that matters


def signed_rank_bounds(values_N: ArrayLike, low_level: float, high_level: float) -> tuple[float, float, float]:
    """(lower bound, estimate, upper bound) of the centre of symmetry of N independent values.

    Args:
        low_level: probability at most that the lower bound is above the centre; `high_level` that the upper is below.
            A bound is infinite where so few values cannot give one.
    """
    values = np.asarray(values_N, dtype=float)
    n = len(values)
    assert n >= 1, "bounds need at least one value"
    walsh = np.sort(((values[:, None] + values) / 2)[np.triu_indices(n)])
    below, above = _beyond(n, low_level), _beyond(n, high_level)
    low = -np.inf if below is None else float(walsh[below])
    high = np.inf if above is None else float(walsh[len(walsh) - 1 - above])
    return low, float(np.median(walsh)), high


def _beyond(n: int, level: float) -> int | None:
    """How many Walsh averages lie beyond a bound of `level`; None where even the outermost one would not do."""
    if n > EXACT_UP_TO:
        mean, variance = n * (n + 1) / 4, n * (n + 1) * (2 * n + 1) / 24
        # half a rank further out than the continuity correction asks: no bolder than the exact bound
        rank = int(np.floor(mean - 1 + stats.norm.ppf(level) * np.sqrt(variance))) if level > 0 else -1
        return rank if rank >= 0 else None
    # the bound with w averages beyond it is on the wrong side of the centre just if W <= w
    w = int(np.searchsorted(_distribution(n), level, side="right")) - 1
    return w if w >= 0 else None


@lru_cache(maxsize=EXACT_UP_TO)
def _distribution(n: int) -> NDArray[np.float64]:
    """P(W <= w) for w = 0 .. n(n+1)/2, where each of the ranks 1 .. n is in the sum W by the throw of a coin."""
    chance = np.ones(1)
    for rank in range(1, n + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return chance.cumsum()
