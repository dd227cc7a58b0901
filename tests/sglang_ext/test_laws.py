"""Sampled tokens of real engines against the target's law by Hugging Face: plain decoding, and the rules of METHODS 1.2
(sampled chain), 1.3 (one-hot chain) and 1.4 (tree)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engines import running_engine
from laws import check_greedy_in_a_mixed_batch, check_law, check_laws, check_seeds, fit
from toy import DRAFT_STEPS, Toy, V, filtered, make_toy

TRUNCATED = ({"kind": "truncated", "size": 9}, {"ids": torch.tensor([0, 2, 3, 5, 6, 9, 11, 12, 15])})
ENGINES: dict[str, tuple[tuple[Any, ...] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "one_hot_chain": (({"kind": "full"},), {}),
    "sampled_chain": (TRUNCATED, {"speculative_use_rejection_sampling": True}),
    "tree": (TRUNCATED, {"topk": 3, "num_draft_tokens": 8}),
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k_and_top_p": {"top_k": 5, "top_p": 0.7},
    "min_p": {"min_p": 0.12},
    "all": {"temperature": 0.8, "top_k": 8, "top_p": 0.85, "min_p": 0.05},
    "logit_bias": {"logit_bias": {"3": 1.5, "5": -1000.0, "9": -0.5}, "top_k": 6, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    head, options = ENGINES[request.param]
    drafter = None if head is None else toy.save_drafter(tmp_path_factory.mktemp("toy") / "drafter", *head)
    options = {"target": toy.folder, "max_running_requests": 64, "skip_tokenizer_init": True} | options
    with running_engine(drafter, draft_steps=DRAFT_STEPS, **options) as engine:
        yield engine


def test_law_at_temperature_1(engine: Any, toy: Toy) -> None:
    """Also that the test would see a law that is only a little wrong."""
    report = check_law(engine, toy, requests=4_000)
    assert report.num_pairs >= 100_000
    assert fit(report.samples, lambda logits: filtered(logits, temperature=1.1)).p_value < 1e-6


def test_law_of_filters(engine: Any, toy: Toy) -> None:
    reports = check_laws(engine, toy, FILTERS, requests=400)
    # SGLang's own verification would never emit some of the tokens that plain decoding does
    assert any(
        (
            np.take_along_axis(top_p_of_top_k(sample.logits_RJV, 5, 0.7), sample.answers_RJ[..., None], axis=-1) == 0
        ).any()
        for sample in reports["top_k_and_top_p"].samples
    )


def top_p_of_top_k(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    least = np.sort(logits, axis=-1)[..., V - top_k, None]
    return filtered(np.where(logits < least, -1e9, logits), top_p=top_p)


def test_law_without_seeds(engine: Any, toy: Toy) -> None:
    check_law(engine, toy, requests=400, seed=None, top_p=0.9)


def test_seeds(engine: Any) -> None:
    check_seeds(engine)
    check_seeds(engine, top_p=0.9, min_p=0.05)


def test_greedy_requests_stay_greedy(engine: Any, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)
