"""Two tensor-parallel ranks, of target and drafter: token-identical to plain decoding on one, swaps included, whether a
head is whole on every rank or shared."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Ids, Oracle, generate, output_ids, running_engine
from faults import share_small_heads, shared_heads
from fixture_models import DRAFTERS
from last_hidden_cases import ACCURACY, save
from lossless import check_counts
from small_world import untrained
from volume import IS_FULL, volume

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.adapter.cpu.fork_server import ForkingContext
from sglang_ext.adapter.engine import swap_drafter
from sglang_ext.adapter.patches import lent
from sglang_ext.trees.static import StaticTree, greedy_paths

TREE = {"topk": 4, "num_draft_tokens": 12}
SHARED = ("full", "slimspec", "truncated", "truncated_by_step", "int4")


@pytest.fixture(autouse=True)
def forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """`make test` forks the ranks, which SGLang starts by itself: each of the three processes imports all of it."""
    if IS_FULL:
        yield
        return
    with lent("sglang.srt.entrypoints.engine.mp", ForkingContext()):
        yield


@pytest.mark.parametrize("tree", [pytest.param({}, id="chain"), pytest.param(TREE, id="tree", marks=pytest.mark.slow)])
def test_greedy_identity(tree: dict[str, int], prompts: list[Ids], oracle: Oracle) -> None:
    options = {"draft_steps": 4, "tp_size": 2, "enable_custom_logit_processor": True, **tree}
    accepted, some = {}, prompts[: volume(12, 6)]
    with running_engine(DRAFTERS["full"], **options) as engine:
        for kind in ("full", "specvocab", *(f"{kind} shared" for kind in SHARED)):
            if kind == "full shared":
                share_small_heads(engine)
            swap_drafter(engine, str(DRAFTERS[kind.split()[0]]))
            assert shared_heads(engine) == ("shared" in kind)
            answers = generate(engine, some)
            assert output_ids(answers) == oracle.answers[: len(some)]
            check_counts(answers, 4)
            accepted[kind] = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    assert accepted["full shared"] == accepted["full"]


@pytest.mark.slow
def test_heads_of_each_position(prompts: list[Ids], oracle: Oracle, demo_target: FrozenTarget, tmp_path: Path) -> None:
    """Of an untrained drafter, which is right now and then."""
    drafter = untrained(demo_target, "medusa", {"positions": 3}, {"kind": "full"})
    tree = StaticTree(greedy_paths(ACCURACY, 12))
    folder, again = (save(tmp_path / name, drafter, demo_target, tree) for name in ("medusa", "again"))
    accepted, some = [], prompts[: volume(12, 6)]
    with running_engine(folder, draft_steps=3, tp_size=2, enable_custom_logit_processor=True, **TREE) as engine:
        for runs in (None, again, folder):  # whole, then shared, then from one that has not all of its head
            if runs is not None:
                share_small_heads(engine)
                swap_drafter(engine, str(runs))
            assert shared_heads(engine) == (0 if runs is None else 3)  # one a position
            answers = generate(engine, some)
            assert output_ids(answers) == oracle.answers[: len(some)]
            check_counts(answers, 3)
            accepted.append([a["meta_info"]["spec_correct_drafts_histogram"] for a in answers])
    assert accepted[0] == accepted[1] == accepted[2]
