"""EAGLE-3 with SLiM's tree in a real engine: token-identical to plain decoding, EAGLE-2's own tree where it has to be,
fewer verified nodes, and swapped for drafters without a tree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Ids, Oracle, generate, output_ids, running_engine
from fixture_models import DRAFTERS
from last_hidden_cases import as_answers, slim_on
from lossless import Lossless, check_counts, check_greedy_identity

from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree

STEPS, TOPK, NODES = 4, 4, 12
TREES: dict[str, tuple[str, dict[str, Any]]] = {
    "s": ("full", {"hypotheses": 6}),
    "ss": ("slimspec", {"hypotheses": 1, "length_bonus": 0.5}),
    "l": ("truncated_by_step", {"hypotheses": 40, "unseen": "smoothed"}),
    # steps of another width: often nothing but the root is left to verify
    "zero": ("full", {"hypotheses": 12, "unseen": "zero"}),
}


@pytest.fixture(scope="module")
def drafters(prompts: list[Ids], oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, answers = tmp_path_factory.mktemp("drafters"), as_answers(prompts, oracle.answers)
    made = {name: slim_on(folder / name, DRAFTERS[base], answers, **options) for name, (base, options) in TREES.items()}
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    drafter.draft_tree = SlimTree(SlimOptions(correlation=False, hypotheses=NODES - 1), info.body.vocab_size)
    save_drafter(folder / "eagle2", drafter, info.target, share_with=DRAFTERS["full"])
    return made | {"eagle2": folder / "eagle2"}


@pytest.fixture(scope="module")
def engine(drafters: dict[str, Path]) -> Iterator[Any]:
    with running_engine(drafters["s"], draft_steps=STEPS, topk=TOPK, num_draft_tokens=NODES) as engine:
        yield engine


def test_the_drafter_that_the_engine_starts_with(engine: Any, prompts: list[Ids], oracle: Oracle) -> None:
    answers = generate(engine, prompts)
    assert output_ids(answers) == oracle.answers
    check_counts(answers, STEPS)


@pytest.mark.parametrize("name", [*TREES, "eagle2"])
def test_greedy_identity(engine: Any, name: str, drafters: dict[str, Path], prompts: list[Ids], oracle: Oracle) -> None:
    check_counts(check_greedy_identity(engine, drafters[name], prompts, oracle, is_first=name == "s"), STEPS)


def steps_of(engine: Any, drafter: Path, prompts: list[Ids]) -> list[tuple[list[int], list[int]]]:
    """(tokens, how often 0, 1, .. drafts were accepted) of each prompt."""
    swap_drafter(engine, str(drafter))
    answers = generate(engine, prompts)
    return [(a["output_ids"], a["meta_info"]["spec_correct_drafts_histogram"]) for a in answers]


def test_without_correlation_it_is_eagle2_and_a_swap_changes_the_tree(
    engine: Any, drafters: dict[str, Path], prompts: list[Ids]
) -> None:
    found = {
        name: steps_of(engine, path, prompts)
        for name, path in (("own", DRAFTERS["full"]), *((n, drafters[n]) for n in ("eagle2", "s", "zero")))
    }
    again = steps_of(engine, DRAFTERS["full"], prompts)
    assert found["own"] == found["eagle2"] == again
    assert found["own"] != found["s"] != found["zero"]


class TestLossless(Lossless):
    drafter, is_pruned = "s", True


def test_what_does_not_fit_is_refused_and_changes_nothing(
    engine: Any, drafters: dict[str, Path], tmp_path: Path, prompts: list[Ids]
) -> None:
    before = steps_of(engine, drafters["s"], prompts[:16])
    drafter, info = load_drafter(drafters["eagle2"])
    assert info.target is not None
    save_drafter(tmp_path / "faulty", drafter, info.target, share_with=DRAFTERS["full"])
    config = json.loads((tmp_path / "faulty" / "config.json").read_text())
    config["draft_tree"] = StaticTree([[0], [1]]).spec()
    (tmp_path / "faulty" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"draft_tree\.kind 'static' does not fit a drafter of kind eagle3"):
        swap_drafter(engine, str(tmp_path / "faulty"))
    after = [(a["output_ids"], a["meta_info"]["spec_correct_drafts_histogram"]) for a in generate(engine, prompts[:16])]
    assert after == before
