"""A drafter trained with the vocabulary whose size a calibration chose: planned, trained, gone on with, known again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answerers import short_answers
from checked_configs import check
from torch import Tensor

from rayspec.artifacts import write_artifacts
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported, plan
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.heads import parse_head

SIZE = 40
TRUNCATED = {"kind": "truncated"}


def calibrate(folder: Path, target: FrozenTarget, tensors: dict[str, Tensor] | None = None) -> str:
    """A calibration, by default of SIZE ids."""
    info = target.info("tiny")
    about = {"name": "tiny", "vocab_size": info.vocab_size, "tokenizer_sha256": info.tokenizer_sha256}
    tensors = {"counts": torch.ones(info.vocab_size, dtype=torch.int64), **(tensors or {"ids": torch.arange(SIZE)})}
    write_artifacts(folder, tensors, {"target": about, "stop_ids": target.eos_ids, "rule": {"kind": "bcl"}}, {})
    return str(folder)


@pytest.fixture(scope="module")
def answers(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    folder = tmp_path_factory.mktemp("answers")
    return short_answers(folder, tiny_target, 4)


@pytest.fixture
def config(tiny_target: FrozenTarget, tiny_target_folder: Path, text_folder: Path, tmp_path: Path) -> Any:
    """One drafter, `bcl`, whose size is left to the calibration in tmp_path/bcl."""
    entry = DrafterEntry(
        name="bcl", artifacts=calibrate(tmp_path / "bcl", tiny_target), draft_head=parse_head(TRUNCATED)
    )
    short = AnswersConfig(prompts=str(text_folder), count=4, max_prompt_tokens=20, answer_tokens=14)
    return DrafterTrainConfig(
        target=str(tiny_target_folder),
        output_dir=str(tmp_path / "out"),
        work_dir=str(tmp_path / "work"),
        drafters=[entry],
        answers=short,
        held_out=replace(short, greedy_share=1.0),
        recipe=Recipe(num_steps=4, batch_size=2, warmup_steps=1, ttt_steps=2, bfloat16=False),
        evaluation=EvaluationConfig(draft_steps=2, every=4, sequences=2),
        checkpoint_every=2,
        log_every=1,
        mlflow=False,
    )


def heads(config: DrafterTrainConfig) -> list[dict[str, Any]]:
    return [entry.draft_head.spec() for entry in check(config).drafters]


def test_a_size_that_is_left_out_is_the_calibrations(config: DrafterTrainConfig) -> None:
    assert heads(config) == [{"kind": "truncated", "size": SIZE, "step_sizes": None}]
    (entry,) = config.drafters
    inside = replace(
        entry, name="rdk", draft_head=parse_head({"kind": "rdk", "base": {**TRUNCATED, "step_sizes": [SIZE, 9]}})
    )
    written = replace(entry, name="fewer", draft_head=parse_head({**TRUNCATED, "size": 7}))
    assert heads(replace(config, drafters=[inside, written])) == [
        {
            **{"kind": "rdk", "neighbours": 8, "self_weight": 0.9},
            "base": {**TRUNCATED, "step_sizes": [SIZE, 9], "size": SIZE},
        },
        {**TRUNCATED, "size": 7, "step_sizes": None},
    ]


def test_the_plan_says_the_number(config: DrafterTrainConfig) -> None:
    (line,) = (line for line in plan(config) if line.endswith("to train"))
    assert line.startswith("bcl {'kind': 'truncated', 'size': 40} -> ")


def test_a_size_that_nobody_chooses_is_refused(
    config: DrafterTrainConfig, tiny_target: FrozenTarget, tmp_path: Path
) -> None:
    clusters = calibrate(tmp_path / "clusters", tiny_target, {"cluster_of": torch.arange(257).clamp(max=1)})
    for artifacts, said in (
        (
            None,
            r"drafters\[bcl\]: draft_head.size is absent, .* but none are named; write a size, or name as artifacts",
        ),
        (clusters, "draft_head.size is absent, .* but those named hold cluster_of, counts and no ids; write a size"),
        ("nowhere", r"drafters\[bcl\]: no calibration 'nowhere'"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(replace(config, drafters=[replace(config.drafters[0], artifacts=artifacts)]))


def test_what_was_trained_has_the_number_and_another_one_is_refused(
    config: DrafterTrainConfig, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    checked = check(config)
    train_drafter(checked, checked.drafters[0], tiny_target, answers, answers)
    drafter, info = load_drafter(tmp_path / "out" / "bcl", stop_ids=tiny_target.eos_ids)
    assert info.head.spec() == {"kind": "truncated", "size": SIZE, "step_sizes": None}
    assert drafter.lm_head.at(0).get_buffer("ids").tolist() == list(range(SIZE))
    assert json.loads((tmp_path / "out" / "bcl" / "training.json").read_text())["draft_head"]["size"] == SIZE
    assert is_exported(checked, checked.drafters[0], tiny_target.sha256)

    calibrate(tmp_path / "bcl", tiny_target, {"ids": torch.arange(SIZE + 1)})
    with pytest.raises(ValueError, match=r"holds a drafter with draft_head.size 40, this run has 41; delete that"):
        plan(config)
    calibrate(tmp_path / "bcl", tiny_target, {"ids": torch.tensor([0, *range(SIZE - 1, 0, -1)])})  # as many
    with pytest.raises(ValueError, match=r"holds a drafter with calibration.sha256 \(the artifacts\) .*delete that"):
        plan(config)
    calibrate(tmp_path / "bcl", tiny_target)
    assert "already exported" in "\n".join(plan(config))


def test_unfinished_training_does_not_go_on_with_another_size(
    config: DrafterTrainConfig, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    checked = check(config)
    with pytest.raises(KeyboardInterrupt):
        train_drafter(checked, checked.drafters[0], tiny_target, answers, answers, on_step=interrupt)
    calibrate(tmp_path / "bcl", tiny_target, {"ids": torch.arange(SIZE + 1)})
    again = check(config)
    with pytest.raises(ValueError, match=r"was started with draft_head.*40.*now it is .*41.*delete that folder"):
        train_drafter(again, again.drafters[0], tiny_target, answers, answers)

    calibrate(tmp_path / "bcl", tiny_target)
    assert "to resume at step-00000002" in "\n".join(plan(config))
    state = tmp_path / "work" / "unfinished" / "bcl" / "step-00000002" / "progress.json"
    stored = json.loads(state.read_text())
    del stored["fingerprint"]["draft_head"]["step_sizes"]  # as earlier releases wrote it
    state.write_text(json.dumps(stored))
    train_drafter(checked, checked.drafters[0], tiny_target, answers, answers)
    history = json.loads((tmp_path / "out" / "bcl" / "training.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
