"""Sampled tokens of EAGLE-3 with SLiM's tree against the target's law by Hugging Face: the rule of trees
is exact whatever was pruned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import running_engine
from last_hidden_cases import as_answers, slim_on
from laws import check_greedy_in_a_mixed_batch, check_laws, check_seeds
from test_laws import FEWER, FILTERS, REQUESTS, check_pairs
from toy import DRAFT_STEPS, Toy, V, make_toy

from sglang_ext.adapter.engine import swap_drafter

TREES: dict[str, dict[str, Any]] = {
    "slim": {"hypotheses": 4},
    "longest": {"hypotheses": 1, "length_bonus": 2.0},
    "zero": {"hypotheses": 6, "unseen": "zero"},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def drafters(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    generator = torch.Generator().manual_seed(0)
    prompts, continued = (torch.randint(V, (16, n), generator=generator).tolist() for n in (5, 11))
    answers = as_answers(prompts, continued)  # few pairs, so that many were never seen
    base = toy.save_drafter(folder / "full", "full")
    return {"full": base} | {name: slim_on(folder / name, base, answers, **options) for name, options in TREES.items()}


@pytest.fixture(scope="module")
def engine(toy: Toy, drafters: dict[str, Path]) -> Iterator[Any]:
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 128}
    with running_engine(drafters["slim"], topk=3, num_draft_tokens=8, skip_tokenizer_init=True, **options) as engine:
        yield engine


@pytest.mark.parametrize("name", [*TREES, "full"])
def test_law(engine: Any, toy: Toy, drafters: dict[str, Path], name: str) -> None:
    swap_drafter(engine, str(drafters[name]))
    check_pairs(engine, toy, FEWER)


def test_law_of_filters(engine: Any, toy: Toy, drafters: dict[str, Path]) -> None:
    swap_drafter(engine, str(drafters["slim"]))
    check_laws(engine, toy, FILTERS, requests=REQUESTS)


def test_seeds(engine: Any) -> None:
    check_seeds(engine, top_p=0.9, min_p=0.05)


def test_greedy_requests_stay_greedy(engine: Any, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)
