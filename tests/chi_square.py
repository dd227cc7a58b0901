"""Pearson's test of counts against a known law, shared by the tests of every sampling rule."""

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import chi2

MIN_EXPECTED = 5.0  # below it the statistic does not follow the chi-square law


def pearson(counts: ArrayLike, law: ArrayLike) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells expected fewer than 5 times are put together.

    Raises AssertionError for a count where the law has no mass: that is no matter of chance.
    """
    counts, law = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(law, dtype=np.float64).ravel()
    assert not counts[law == 0].any(), "tokens outside of the law's support were emitted"
    counts, law = counts[law > 0], law[law > 0]
    order = np.argsort(law)
    counts, expected = counts[order], (law / law.sum() * counts.sum())[order]
    rare = int((expected < MIN_EXPECTED).sum())
    if rare:  # and the next cell with them, where they are still expected too seldom together
        rare += expected[:rare].sum() < MIN_EXPECTED
        counts = np.concatenate([[counts[:rare].sum()], counts[rare:]])
        expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def p_value(*tables: tuple[ArrayLike, ArrayLike]) -> float:
    """Of all (counts, law) tables together, which must be independent given their totals; 1 if nothing was left to
    chance."""
    statistic, freedom = np.sum([pearson(counts, law) for counts, law in tables], axis=0)
    return float(chi2.sf(statistic, freedom)) if freedom else 1.0
