"""EAGLE-1 and 2 drafters under SGLang's EAGLE: token-identical to plain decoding for chains and trees, drafts that are
those of training, live swap, and a tree that is pruned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import trained_eagle
from engines import Ids, Oracle, generate, running_engine
from fixture_models import CALIBRATIONS, DRAFTERS, TARGET
from independent_cases import save_with_heads
from last_hidden_cases import as_answers, slim_on
from lossless import Lossless, check_counts, check_greedy_identity, check_swap_and_its_refusals, with_weights_of

from rayspec.artifacts import load_artifacts
from rayspec.training.acceptance import verify_steps
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "chain": {"draft_steps": STEPS},
    "tree": {"draft_steps": STEPS, "topk": 4, "num_draft_tokens": 12},
}
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "truncated": {"kind": "truncated", "size": 1024},
    "slimspec": {"kind": "slimspec", "rank": 64},
    "routed": {
        "kind": "dynaspec", "clusters": 128, "first": 64, "later": 32, "rule": "fixed", "router_width": 64
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TARGET, torch.float32)


@pytest.fixture(scope="module")
def drafters(
    target: FrozenTarget, prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    answers, folder = as_answers(prompts, oracle.answers), tmp_path_factory.mktemp("drafters")
    drafter = trained_eagle(target, answers, steps=30, batch_size=16)
    ids, _ = load_artifacts(CALIBRATIONS / "vocabtrim-2048")
    clusters, _ = load_artifacts(CALIBRATIONS / "clusters-128")
    artifacts = {"ids": ids["ids"], "cluster_of": clusters["cluster_of"]}
    made = save_with_heads(folder, drafter, target, HEADS, artifacts)
    return made | {"pruned": slim_on(folder / "pruned", made["full"], answers, hypotheses=6)}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Iterator[Any]:
    with running_engine(drafters["full"], **ENGINES[request.param]) as engine:
        yield engine


@pytest.mark.parametrize("name", [*HEADS, "pruned"])
def test_greedy_identity(engine: Any, name: str, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    answers = check_greedy_identity(engine, drafters[name], prompts, oracle, is_first=name == "full")
    if name != "routed":  # by a router that knows nothing
        check_counts(answers, STEPS)


@pytest.mark.parametrize("engine", ["chain"], indirect=True)
@pytest.mark.parametrize("name", ["full", "truncated"])
def test_the_engine_accepts_what_training_says(
    engine: Any, name: str, target: FrozenTarget, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle
) -> None:
    """Each request takes as many verify steps as teacher forcing over its answer says: features, embeddings, positions
    and cache are training's."""
    swap_drafter(engine, str(drafters[name]))
    found = [a["meta_info"]["spec_verify_ct"] for a in generate(engine, prompts)]
    drafter, _ = load_drafter(drafters[name])
    answers = as_answers(prompts, oracle.answers)
    assert found == verify_steps(drafter, target, answers, num_steps=STEPS, batch_size=16, chunk_rows=256)


class TestLossless(Lossless):
    drafter = "truncated"


def test_swap_and_its_refusals(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    faulty = {
        r"missing lm_head\.up": with_weights_of(drafters["slimspec"], drafters["full"], tmp_path / "faulty"),
        "a drafter of kind eagle3 needs another worker than the running eagle": DRAFTERS["full"],
    }
    check_swap_and_its_refusals(engine, drafters, "full", "routed", faulty, prompts, oracle)
