"""MEDUSA, BPD, HYDRA and SLIM in real engines: token-identical to plain decoding for chains and trees, and live
swap."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import DRAFTERS, TARGET, Ids, Oracle, generate, output_ids, running_engine
from last_hidden_cases import DEMO, as_answers, demo_drafters, slim_on
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

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.engine import swap_drafter

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = {
    "chain": {"drafter": "medusa", "draft_steps": STEPS},  # BPD
    "tree": {"drafter": "hydra", "draft_steps": STEPS, "topk": 4, "num_draft_tokens": 12},
    "slim": {"drafter": "slim", "draft_steps": STEPS, "topk": 8, "num_draft_tokens": 20},
}
NAMES = [*DEMO, "slim", "slim_zero"]


@pytest.fixture(scope="module")
def drafters(prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target, answers = FrozenTarget.load(TARGET, torch.float32), as_answers(prompts, oracle.answers)
    folder = tmp_path_factory.mktemp("drafters")
    made = demo_drafters(folder, target, answers)
    made["slim"] = slim_on(folder / "slim", made["medusa"], answers, hypotheses=8)
    # steps of another width: often nothing but the root is left to verify
    made["slim_zero"] = slim_on(folder / "slim_zero", made["medusa"], answers, hypotheses=12, unseen="zero")
    return made


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, drafters: dict[str, Path]) -> Iterator[Any]:
    options = dict(ENGINES[request.param])
    with running_engine(drafters[options.pop("drafter")], **options) as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_greedy_identity(
    request: pytest.FixtureRequest,
    engine: Any,
    name: str,
    drafters: dict[str, Path],
    prompts: list[Ids],
    oracle: Oracle,
) -> None:
    shape = request.node.callspec.params["engine"]
    if shape == "chain" and name.startswith("slim"):
        pytest.skip("a chain takes no notice of a tree")
    own = ENGINES[shape]["drafter"]
    alone = len(prompts) if name == own else 8
    answers = check_greedy_identity_of(engine, drafters[name], prompts, oracle, alone)
    if name != "medusa_routed":
        check_counts(answers, STEPS)


def test_stop_inside_of_a_block(engine: Any, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    swap_drafter(engine, str(drafters["hydra"]))
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
    for name in ("medusa", "hydra", "medusa"):
        swap_drafter(engine, str(drafters[name]))
        accepted[name] = [a["meta_info"]["spec_num_correct_drafts"] for a in generate(engine, prompts[:16])]
    assert accepted["medusa"] != accepted["hydra"]
    shutil.copytree(drafters["hydra"], tmp_path / "faulty")
    (tmp_path / "faulty" / "model.safetensors").write_bytes(
        (drafters["medusa_truncated"] / "model.safetensors").read_bytes()
    )
    with pytest.raises(ValueError, match=r"missing lm_head\.0\.down"):
        swap_drafter(engine, str(tmp_path / "faulty"))
    with pytest.raises(ValueError, match="a drafter of kind eagle3 needs another worker"):
        swap_drafter(engine, str(DRAFTERS["full"]))
    after = generate(engine, prompts[:16])
    assert output_ids(after) == oracle.answers[:16]
    assert [a["meta_info"]["spec_num_correct_drafts"] for a in after] == accepted["medusa"]


def test_step_clock_splits_the_step(engine: Any, prompts: list[Ids]) -> None:
    check_step_clock(engine, prompts)
