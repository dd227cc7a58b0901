"""The statistics of `distributions.py` on draws that are made here: right under the distribution, and they see what is
wrong."""

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import pytest
from distributions import NEW_TOKENS, Sample, fit
from scipy.stats import kstest
from toy import V, filtered
from volume import volume

RNG = np.random.default_rng(0)
LOGITS_VVV = 1.5 * RNG.normal(size=(V, V, V))  # by the last two tokens


def draw(requests: int, change: Callable[[np.ndarray], np.ndarray], rng: np.random.Generator) -> Sample:
    """Answers whose next token is drawn from `change` of its distribution; logits are those of the true
    distribution."""
    answers_RJ = np.zeros((requests, NEW_TOKENS), dtype=int)
    answers_RJ[:, 0] = rng.integers(0, V, requests)
    logits_RJV = np.zeros((requests, NEW_TOKENS, V))
    for j in range(1, NEW_TOKENS):
        logits_RJV[:, j] = LOGITS_VVV[answers_RJ[:, j - 2] if j > 1 else 0, answers_RJ[:, j - 1]]
        drawn_RV = change(filtered(logits_RJV[:, j]))
        answers_RJ[:, j] = (drawn_RV.cumsum(axis=1) < rng.random((requests, 1))).sum(axis=1).clip(max=V - 1)
    return Sample(answers_RJ, logits_RJV)


def unchanged(distribution_RV: np.ndarray) -> np.ndarray:
    return distribution_RV


def more_of_some_tokens(distribution_RV: np.ndarray) -> np.ndarray:
    """What a shortlist does that is verified with the distribution over the vocabulary."""
    changed = distribution_RV * np.where(np.arange(V) % 3 == 0, 1.1, 1.0)
    return changed / changed.sum(axis=1, keepdims=True)


def sharper(distribution_RV: np.ndarray) -> np.ndarray:
    changed = distribution_RV**1.1
    return changed / changed.sum(axis=1, keepdims=True)


def test_p_values_are_uniform_under_the_distribution() -> None:
    rng = np.random.default_rng(1)
    fits = [fit([draw(300, unchanged, rng)], filtered) for _ in range(volume(100, 50))]
    for name in asdict(fits[0]):
        assert kstest([getattr(f, name) for f in fits], "uniform").pvalue > 1e-3, name


@pytest.mark.parametrize("change", [more_of_some_tokens, sharper])
def test_a_slightly_wrong_distribution_is_caught(change: Callable[[np.ndarray], np.ndarray]) -> None:
    assert fit([draw(1_000, change, np.random.default_rng(2))], filtered).p_value < 1e-6
