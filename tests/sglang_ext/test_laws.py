"""Sampled tokens of real engines against the target's law by Hugging Face: rules 2, 3 and 4 of METHODS section 1."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import running_engine
from laws import check_greedy_in_a_mixed_batch, check_law, check_laws, check_seeds, fit
from toy import ToyLaw, V, filtered, save_toy_drafter, save_toy_target

TRUNCATED = ({"kind": "truncated", "size": 9}, {"ids": torch.tensor([0, 2, 3, 5, 6, 9, 11, 12, 15])})
ENGINES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one_hot_chain": (({"kind": "full"},), {"draft_steps": 3}),
    "sampled_chain": (TRUNCATED, {"draft_steps": 3, "speculative_use_rejection_sampling": True}),
    "tree": (TRUNCATED, {"draft_steps": 3, "topk": 3, "num_draft_tokens": 8}),
}
FILTERS: dict[str, dict[str, Any]] = {
    "top_k_and_top_p": {"top_k": 5, "top_p": 0.7},
    "min_p": {"min_p": 0.12},
    "all": {"temperature": 0.8, "top_k": 8, "top_p": 0.85, "min_p": 0.05},
    "logit_bias": {"logit_bias": {"3": 1.5, "5": -1000.0, "9": -0.5}, "top_k": 6, "top_p": 0.9},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy_target(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def law(target: Path) -> ToyLaw:
    return ToyLaw(target)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    head, options = ENGINES[request.param]
    drafter = save_toy_drafter(tmp_path_factory.mktemp("toy") / "drafter", target, *head)
    with running_engine(drafter, target=target, max_running_requests=64, skip_tokenizer_init=True, **options) as engine:
        yield engine


def test_law_at_temperature_1(engine: Any, law: ToyLaw) -> None:
    """Also that the test would see a law that is only a little wrong."""
    report = check_law(engine, law, requests=4_000)
    assert report.num_pairs >= 100_000
    assert fit(report.samples, lambda logits: filtered(logits, temperature=1.05)).least < 1e-6


def test_law_of_filters(engine: Any, law: ToyLaw) -> None:
    reports = check_laws(engine, law, FILTERS, requests=400)
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


def test_law_without_seeds(engine: Any, law: ToyLaw) -> None:
    check_law(engine, law, requests=400, seed=None, top_p=0.9)


def test_seeds(engine: Any) -> None:
    check_seeds(engine)
    check_seeds(engine, top_p=0.9, min_p=0.05)


def test_greedy_requests_stay_greedy(engine: Any) -> None:
    check_greedy_in_a_mixed_batch(engine)
