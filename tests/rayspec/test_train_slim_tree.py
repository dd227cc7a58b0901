"""rayspec train gives a trained EAGLE-3 SLiM's tree: nothing is trained, and all but the pairs is its base's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answerers import short_answers
from safetensors.torch import load_file, save_file

from rayspec.artifacts import BIGRAM, write_artifacts
from rayspec.calibration.counting import add_up_pairs, pair_ids, partial_counts
from rayspec.config import load_config
from rayspec.costs import drafter_cost
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported, plan
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from rayspec.training.trees import SlimTreeConfig
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.counting import StepShape
from sglang_ext.drafters.shared.features.cost import FeatureCost
from sglang_ext.folder_kinds import CALIBRATED, WEIGHTS
from sglang_ext.heads import parse_head
from sglang_ext.settings import build
from sglang_ext.trees.slim import SlimOptions, SlimTree

FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
UNCORRELATED = DrafterEntry(
    name="x",
    base="full",
    draft_head=parse_head({"kind": "full"}),
    tree=SlimTreeConfig(correlation=False, hypotheses=5),
)
Family = tuple[DrafterTrainConfig, AnswerSet]


def make(family: Family, target: FrozenTarget, head: DrafterEntry) -> Path:
    config, answers = family
    train_drafter(config, head, target, answers, answers)
    return Path(config.output_dir) / head.name


@pytest.fixture(scope="module")
def pairs(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, info = tmp_path_factory.mktemp("calibration") / "pairs", tiny_target.info("tiny")
    counted = add_up_pairs([partial_counts(pair_ids(np.arange(9), np.arange(9) + 1))], info.vocab_size, "toy")
    target = {"name": "tiny", "vocab_size": info.vocab_size, "tokenizer_sha256": info.tokenizer_sha256}
    tensors = dict(zip((*BIGRAM, "counts"), (*counted, counted.second_V), strict=True))
    write_artifacts(folder, tensors, {"target": target, "stop_ids": [0], "rule": {"kind": "bigram"}}, {})
    return folder


@pytest.fixture(scope="module")
def slim(pairs: Path) -> DrafterEntry:
    tree = SlimTreeConfig(bigram=str(pairs), hypotheses=20, unseen="smoothed", strength=0.4)
    return DrafterEntry(name="slim", base="full", draft_head=parse_head({"kind": "full"}), tree=tree)


@pytest.fixture(scope="module")
def family(
    tiny_target: FrozenTarget, tiny_target_folder: Path, slim: DrafterEntry, tmp_path_factory: pytest.TempPathFactory
) -> Family:
    """A trained `full`, and `slim` with its body, its head and a tree."""
    folder = tmp_path_factory.mktemp("family")
    answers = short_answers(folder / "answers", tiny_target, 4)
    config = DrafterTrainConfig(
        target=str(tiny_target_folder),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=[FULL, slim],
        answers=AnswersConfig(prompts="training", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        held_out=AnswersConfig(prompts="held_out", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        recipe=Recipe(num_steps=2, batch_size=2, warmup_steps=1, ttt_steps=2, bfloat16=False),
        evaluation=EvaluationConfig(draft_steps=2, every=4, sequences=2),
        log_every=1,
        mlflow=False,
    )
    made = config, answers
    for head in (FULL, slim):
        make(made, tiny_target, head)
    return made


def test_all_but_the_pairs_is_the_bases(family: Family) -> None:
    out = Path(family[0].output_dir)
    (full, _), (made, info) = load_drafter(out / "full"), load_drafter(out / "slim")
    assert set(load_file(out / "slim" / WEIGHTS)) == {f"draft_tree.{name}" for name in BIGRAM}
    assert [shares.drafter for shares in info.shares] == ["../full"]
    assert all(torch.equal(t, made.state_dict()[name]) for name, t in full.state_dict().items())
    assert isinstance(made.draft_tree, SlimTree)
    assert (made.draft_tree.options.hypotheses, made.draft_tree.options.pairs) == (20, 9)
    assert info.provenance["tree"]["unseen"] == "smoothed"
    assert info.tree == made.draft_tree.options == SlimOptions(unseen="smoothed", strength=0.4, pairs=9)
    assert info.provenance["base"]["drafter"] == "full"
    report = json.loads((out / "slim" / "training.json").read_text())
    assert report["history"] == []
    assert report["held_out"]["tau"] == json.loads((out / "full" / "training.json").read_text())["held_out"]["tau"]
    assert "tree" not in report["held_out"], "only an engine expands it"


def test_another_tree_on_it_without_pairs(family: Family, tiny_target: FrozenTarget) -> None:
    folder = make(family, tiny_target, replace(UNCORRELATED, name="r1", base="slim"))
    assert set(load_file(folder / WEIGHTS)) == {f"draft_tree.{name}" for name in BIGRAM}
    tree = load_drafter(folder)[1].tree
    assert tree == SlimOptions(hypotheses=5, correlation=False)
    plain = make(family, tiny_target, replace(FULL, name="plain", base="slim"))
    assert load_drafter(plain)[1].tree is None


def test_it_is_known_again_and_another_one_refused(
    family: Family, tiny_target: FrozenTarget, slim: DrafterEntry
) -> None:
    config, _ = family
    assert is_exported(config, slim, tiny_target.sha256)
    assert is_exported(config, FULL, tiny_target.sha256)
    assert isinstance(slim.tree, SlimTreeConfig)
    for other in (replace(slim, tree=replace(slim.tree, hypotheses=1)), replace(slim, tree=None)):
        with pytest.raises(ValueError, match="holds a drafter with tree"):
            is_exported(config, other, tiny_target.sha256)


def test_pairs_are_found_by_the_name_that_the_target_was_given(
    family: Family, slim: DrafterEntry, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the hub lies in a folder of another name."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    (tmp_path / "named").symlink_to(family[0].target)
    shutil.copytree(pairs, tmp_path / "home" / "calibrations" / "named" / "own-pairs")
    assert isinstance(slim.tree, SlimTreeConfig)
    entry = replace(slim, tree=replace(slim.tree, bigram="own-pairs"))
    places = {
        "target": str(tmp_path / "named"),
        "output_dir": str(tmp_path / "out"),
        "work_dir": str(tmp_path / "work"),
    }
    assert any(line.startswith("slim ") for line in plan(replace(family[0], **places, drafters=[FULL, entry])))


def test_pairs_that_were_counted_again_are_other_pairs(
    family: Family, tiny_target: FrozenTarget, slim: DrafterEntry, pairs: Path
) -> None:
    kept = (pairs / CALIBRATED).read_bytes()
    counts = load_file(pairs / CALIBRATED)
    try:
        save_file({**counts, "bigram_counts": counts["bigram_counts"] + 1}, pairs / CALIBRATED)
        with pytest.raises(ValueError, match=r"holds a drafter with tree_pairs_sha256 .*delete that folder"):
            is_exported(family[0], slim, tiny_target.sha256)
    finally:
        (pairs / CALIBRATED).write_bytes(kept)
    assert is_exported(family[0], slim, tiny_target.sha256)


def test_what_is_counted_is_the_bases(family: Family) -> None:
    """Pairs are no parameters, and the drafter runs the same passes."""
    out = Path(family[0].output_dir)
    full, slim = (drafter_cost(str(out / name)) for name in ("full", "slim"))
    assert isinstance(slim, FeatureCost)
    assert full.params == slim.params
    shape = StepShape(draft_steps=3, topk=4, num_draft_tokens=12)
    assert full.drafting(shape, keys=50) == slim.drafting(shape, keys=50)
    assert full.read_bytes(shape, 100) == slim.read_bytes(shape, 100)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "static": ({"tree": {"kind": "static"}}, "only what chooses from that one fits; use drafters.x..tree.kind slim"),
    "option": (
        {"drafter": {"kind": "eagle3", "positions": 3}},
        "unknown key 'drafter.positions'; known under drafter: none",
    ),
    "bigram": ({"tree": {"kind": "slim"}}, "^tree.*name the calibration of the pairs"),
    "hypotheses": ({"tree": {"kind": "slim", "correlation": False, "hypotheses": 0}}, "hypotheses must be at least 1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_is_refused(fault: str) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        build(DrafterEntry, {"name": "x", "draft_head": {"kind": "full"}, **changes})


def test_a_calibration_without_pairs_is_refused_before_anything_is_made(
    family: Family, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    info = tiny_target.info("tiny")
    target = {"name": "tiny", "vocab_size": info.vocab_size, "tokenizer_sha256": info.tokenizer_sha256}
    tensors = {"ids": torch.arange(9), "counts": torch.ones(info.vocab_size, dtype=torch.int64)}
    write_artifacts(tmp_path / "ids", tensors, {"target": target, "stop_ids": [0], "rule": {"kind": "frspec"}}, {})
    wrong = replace(UNCORRELATED, tree=SlimTreeConfig(bigram=str(tmp_path / "ids")))
    with pytest.raises(ValueError, match=r"drafters\[x\]: .*but no pairs"):
        plan(replace(family[0], drafters=[wrong]))


def test_from_yaml() -> None:
    config = load_config(DrafterTrainConfig, str(Path(__file__).parents[2] / "configs/train/slim_trees.yaml"), [])
    assert [head.family.kind for head in config.drafters] == ["eagle3"] * 3
    found = [head.asked()["tree"] for head in config.drafters]
    assert [(tree["kind"], tree["bigram"], tree["hypotheses"]) for tree in found] == [
        ("slim", "bigram", count) for count in (1, 20, 40)
    ]


def test_fewer_nodes_than_one_hypothesis_has_are_refused_by_a_plan(family: Family) -> None:
    drafter = Path(family[0].output_dir) / "slim"
    config = SweepConfig(target=family[0].target, draft_steps=[4], drafters=[str(drafter)], baseline="slim")
    enough, too_few = (inspect_drafter(f"{drafter}@2x{nodes}", config)[0].problem for nodes in (5, 4))
    assert enough is None
    assert "of kind slim, needs num_draft_tokens of at least 5 for 4 draft steps, got 4" in str(too_few)
