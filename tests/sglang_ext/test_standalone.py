"""Independent drafters under SGLang's STANDALONE: token-identical to plain decoding for chains and trees, live swap."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import DRAFTERS, TARGET, Ids, Oracle, generate, output_ids, running_engine
from independent_cases import save_with_heads, trained_drafter
from last_hidden_cases import as_answers
from lossless import (
    check_counts,
    check_grammar,
    check_greedy_identity_of,
    check_long_and_one_token_prompts,
    check_sampling_path,
    check_step_clock,
    check_stop_inside_of_a_block,
    check_streaming,
)

from rayspec.calibration.artifacts import load_artifacts
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter

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
    ids, _ = load_artifacts("vocabtrim-4096")
    clusters, _ = load_artifacts("clusters-128")
    artifacts = {"ids": ids["ids"], "cluster_of": clusters["cluster_of"]}
    return save_with_heads(tmp_path_factory.mktemp("drafters"), drafter, target, HEADS, artifacts)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Iterator[Any]:
    with running_engine(drafters["full"], **ENGINES[request.param]) as engine:
        yield engine


@pytest.mark.parametrize("name", HEADS)
def test_greedy_identity(engine: Any, name: str, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    alone = len(prompts) if name in ("full", "truncated") else 8
    answers = check_greedy_identity_of(engine, drafters[name], prompts, oracle, alone)
    if name != "routed":  # by a router that knows nothing
        check_counts(answers, STEPS)


def test_stop_inside_of_a_block(engine: Any, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    swap_drafter(engine, str(drafters["truncated"]))
    check_stop_inside_of_a_block(engine, prompts, oracle)


def test_streaming(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    check_streaming(engine, prompts, oracle)


def test_long_and_one_token_prompts(engine: Any, long_prompt: Ids, prompts: list[Ids], oracle: Oracle) -> None:
    check_long_and_one_token_prompts(engine, long_prompt, prompts, oracle)


def test_sampling_path(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    check_sampling_path(engine, prompts, oracle)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 40, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_a_grammar_holds_in_drafted_tokens(engine: Any, prompts: list[Ids], sampling: dict[str, Any]) -> None:
    check_grammar(engine, prompts, sampling)


def test_swap_and_its_refusals(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids], oracle: Oracle
) -> None:
    accepted = {}
    for name in ("full", "truncated", "full"):
        swap_drafter(engine, str(drafters[name]))
        accepted[name] = [a["meta_info"]["spec_num_correct_drafts"] for a in generate(engine, prompts[:16])]
    assert accepted["full"] != accepted["truncated"]
    shutil.copytree(drafters["full"], tmp_path / "faulty")
    (tmp_path / "faulty" / "model.safetensors").write_bytes((drafters["slimspec"] / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        swap_drafter(engine, str(tmp_path / "faulty"))
    with pytest.raises(ValueError, match="a drafter of kind eagle3 needs another worker than the running independent"):
        swap_drafter(engine, str(DRAFTERS["full"]))
    after = generate(engine, prompts[:16])
    assert output_ids(after) == oracle.answers[:16]
    assert [a["meta_info"]["spec_num_correct_drafts"] for a in after] == accepted["full"]


def test_step_clock_splits_the_step(engine: Any, prompts: list[Ids]) -> None:
    check_step_clock(engine, prompts)
