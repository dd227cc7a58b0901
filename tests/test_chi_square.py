"""The statistic that the sampling tests stand on: its distribution under the null, and that it sees what is wrong."""

import numpy as np
import pytest
from chi_square import p_value, pearson
from scipy.stats import chisquare, kstest


def test_equals_scipy_where_every_cell_is_expected_often() -> None:
    counts, distribution = np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25])
    assert p_value((counts, distribution)) == pytest.approx(chisquare(counts, distribution * 100).pvalue)


def test_p_values_are_uniform_under_the_distribution() -> None:
    rng = np.random.default_rng(0)
    distributions = [rng.dirichlet(np.full(12, 0.5)) for _ in range(20)]
    values = [
        p_value(*((rng.multinomial(200, distribution), distribution) for distribution in distributions))
        for _ in range(500)
    ]
    assert kstest(values, "uniform").pvalue > 1e-3


def test_rare_cells_are_put_together() -> None:
    assert pearson([90, 3, 3, 4], [0.9, 0.03, 0.03, 0.04])[1] == 1
    assert pearson([98, 1, 1], [0.98, 0.01, 0.01]) == (0.0, 0)
    assert p_value(([98, 1, 1], [0.98, 0.01, 0.01])) == 1.0


def test_an_impossible_token_is_no_matter_of_chance() -> None:
    with pytest.raises(AssertionError, match="outside of the distribution's support"):
        pearson([5, 1], [1.0, 0.0])
