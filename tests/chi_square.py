"""Pearson's test of counts against a known distribution, shared by the tests of every sampling rule."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import chi2

MIN_EXPECTED = 5.0  # below it the statistic does not follow the chi-square distribution


def pearson(counts: ArrayLike, distribution: ArrayLike) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected fewer than 5 times are put together.

    Raises AssertionError for a count where the distribution has no mass: that is no matter of chance.
    """
    counts, distribution = (
        np.asarray(counts, dtype=np.float64).ravel(),
        np.asarray(distribution, dtype=np.float64).ravel(),
    )
    assert not counts[distribution == 0].any(), "tokens outside of the distribution's support were emitted"
    counts, distribution = counts[distribution > 0], distribution[distribution > 0]
    order = np.argsort(distribution)
    counts, expected = counts[order], (distribution / distribution.sum() * counts.sum())[order]
    rare = int((expected < MIN_EXPECTED).sum())
    if rare:  # and the next cell with them, where they are still expected too seldom together
        rare += expected[:rare].sum() < MIN_EXPECTED
        counts = np.concatenate([[counts[:rare].sum()], counts[rare:]])
        expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def p_value(*tables: tuple[ArrayLike, ArrayLike]) -> float:
    """Of all (counts, distribution) tables together, which must be independent given their totals; 1 if nothing was
    left to chance."""
    statistic, freedom = np.sum([pearson(counts, distribution) for counts, distribution in tables], axis=0)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0
