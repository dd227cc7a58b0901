"""Sampled tokens of SpecFormer against the target's law by Hugging Face: its slots are drawn independently of each
other, so that a draft's law is the product of theirs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_laws import check_drafts
from engines import running_engine
from last_hidden_cases import as_answers, save, train
from laws import check_greedy_in_a_mixed_batch, check_laws, check_seeds
from small_world import untrained
from test_laws import FEWER, FILTERS, PAIRS, REQUESTS, ROUNDS, check_pairs
from toy import DRAFT_STEPS, IDS, TRUNCATED, Toy, V, make_toy

from sglang_ext.adapter.engine import swap_drafter

HEADS: dict[str, dict[str, Any]] = {"full": {"kind": "full"}, "truncated": TRUNCATED}
ENGINES: dict[str, dict[str, Any]] = {
    "sampled_chain": {"speculative_use_rejection_sampling": True},
    "one_hot_chain": {},
}
sampled_chain = pytest.mark.parametrize("engine", ["sampled_chain"], indirect=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="module")
def drafters(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    generator = torch.Generator().manual_seed(0)
    answers = as_answers(*(torch.randint(V, (256, n), generator=generator).tolist() for n in (5, 11)))
    made = {}
    for name, head in HEADS.items():
        torch.manual_seed(0)
        drafter = untrained(toy.target, "specformer", {"positions": DRAFT_STEPS + 1}, head, {"ids": IDS})
        train(drafter, toy.target, answers, steps=60, batch_size=64)
        made[name] = save(folder / name, drafter, toy.target, None)
    return made


@pytest.fixture(scope="module")
def engine(toy: Toy, drafters: dict[str, Path]) -> Iterator[Any]:
    options = {"target": toy.folder, "draft_steps": DRAFT_STEPS, "max_running_requests": 128}
    drawn = {"speculative_use_rejection_sampling": True}
    with running_engine(drafters["full"], skip_tokenizer_init=True, **options, **drawn) as engine:
        yield engine


def test_law_of_filters(engine: Any, toy: Toy) -> None:
    check_laws(engine, toy, FILTERS, requests=REQUESTS)


def test_seeds(engine: Any) -> None:
    check_seeds(engine, top_p=0.9, min_p=0.05)


def test_greedy_requests_stay_greedy(engine: Any, toy: Toy) -> None:
    check_greedy_in_a_mixed_batch(engine, toy)


@pytest.mark.parametrize(("head", "pairs"), [("full", PAIRS), ("truncated", FEWER)])
def test_law_with_every_head(engine: Any, toy: Toy, drafters: dict[str, Path], head: str, pairs: int) -> None:
    swap_drafter(engine, str(drafters[head]))
    check_pairs(engine, toy, pairs)


@pytest.mark.parametrize("head", HEADS)
def test_drafts_follow_the_law_of_the_head(engine: Any, toy: Toy, drafters: dict[str, Path], head: str) -> None:
    check_drafts(engine, toy, drafters[head], FILTERS["all"], requests=ROUNDS)
