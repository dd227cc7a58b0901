"""Independent drafters under SGLang's STANDALONE: token-identical to plain decoding for chains and trees, live swap."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, Oracle, running_engine
from fixture_models import CALIBRATIONS, DRAFTERS, TARGET
from independent_cases import save_with_heads, trained_drafter
from last_hidden_cases import as_answers
from lossless import Lossless, check_counts, check_greedy_identity, check_swap_and_its_refusals, with_weights_of

from rayspec.artifacts import load_artifacts
from rayspec.training.frozen_target import FrozenTarget

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "chain": {"draft_steps": STEPS},
    "tree": {"draft_steps": STEPS, "topk": 4, "num_draft_tokens": 12},
}
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "truncated": {"kind": "truncated", "size": 1024},
    "slimspec": {"kind": "slimspec", "rank": 32},
    "routed": {
        "kind": "dynaspec", "clusters": 128, "first": 64, "later": 32, "rule": "fixed", "router_width": 64
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def drafters(prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target, answers = FrozenTarget.load(TARGET, torch.float32), as_answers(prompts, oracle.answers)
    drafter = trained_drafter(target, answers, {}, steps=30, batch_size=16)
    ids, _ = load_artifacts(CALIBRATIONS / "vocabtrim-2048")
    clusters, _ = load_artifacts(CALIBRATIONS / "clusters-128")
    artifacts = {"ids": ids["ids"], "cluster_of": clusters["cluster_of"]}
    return save_with_heads(tmp_path_factory.mktemp("drafters"), drafter, target, HEADS, artifacts)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Iterator[Any]:
    with running_engine(drafters["full"], **ENGINES[request.param]) as engine:
        yield engine


@pytest.mark.parametrize("name", HEADS)
def test_greedy_identity(engine: Any, name: str, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    answers = check_greedy_identity(engine, drafters[name], prompts, oracle, is_first=name == "full")
    if name != "routed":  # by a router that knows nothing
        check_counts(answers, STEPS)


class TestLossless(Lossless):
    drafter = "truncated"


def test_swap_and_its_refusals(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    faulty = {
        r"missing lm_head\.weight": with_weights_of(drafters["full"], drafters["slimspec"], tmp_path / "faulty"),
        "a drafter of kind eagle3 needs another worker than the running independent": DRAFTERS["full"],
    }
    check_swap_and_its_refusals(engine, drafters, "full", "routed", faulty, prompts, oracle)
