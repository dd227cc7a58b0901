"""A finished drafter answers in SGLang as training says: real engine, the fixture's drafter."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixture_models import DRAFTERS, TARGET, prompt_texts
from torch import Tensor

from rayspec.training import served
from rayspec.training.acceptance import _steps_of
from rayspec.training.data.answer_engines import AnswerEnginesConfig
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.served import ServedTau, check_served
from sglang_ext.heads import parse_head

FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
PROMPTS, ANSWER_TOKENS, DRAFT_STEPS = 6, 96, 3


def right(*rows: str) -> Tensor:
    """Of each draft step, whether its draft of every token of the answer is right."""
    return torch.tensor([[c == "1" for c in row] for row in rows])


@pytest.mark.parametrize(
    ("matches", "steps"),
    [
        (right("0000", "1111"), 3),  # nothing is drafted right: one token a step behind the first
        (right("1111", "0000"), 2),
        (right("1111", "1111"), 1),
        (right("0101", "0010", "1111"), 1),  # tokens 1, 2, 3 by one chain, which goes down the diagonal
        (right("1", "1"), 0),  # the prompt's own pass gives the only token
    ],
)
def test_steps_of_an_answer(matches: Tensor, steps: int) -> None:
    assert _steps_of(matches) == steps


def test_what_agrees() -> None:
    assert ServedTau(2.0, 2.05, 900).agrees
    assert not ServedTau(1.9, 2.0, 900).agrees


@pytest.fixture
def config(tmp_path: Path) -> DrafterTrainConfig:
    return DrafterTrainConfig(
        target=str(TARGET),
        output_dir=str(DRAFTERS["full"].parent),
        work_dir=str(tmp_path),
        held_out=AnswersConfig(count=PROMPTS, answer_tokens=ANSWER_TOKENS, greedy_share=1.0),
        engines=AnswerEnginesConfig(num_threads=1),
        evaluation=EvaluationConfig(draft_steps=DRAFT_STEPS, served_prompts=PROMPTS),
        drafters=[FULL],
    )


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TARGET, torch.float32)


@pytest.fixture(scope="module")
def held_out(target: FrozenTarget) -> AnswerSet:
    prompts = [target.tokenizer.encode(text) for text in prompt_texts(PROMPTS)]
    return served._as_answers(prompts, [[1]] * PROMPTS)


@pytest.mark.slow  # in an engine of the tests' own: test_the_engine_accepts_what_training_says
def test_sglang_accepts_what_teacher_forcing_says(
    config: DrafterTrainConfig, target: FrozenTarget, held_out: AnswerSet, caplog: pytest.LogCaptureFixture
) -> None:
    found = check_served(config, FULL, target, held_out)
    assert found is not None
    assert found.tokens > 300
    assert found.predicted > 1.5, "the drafter is right often enough to be told from one that is not"
    assert found.agrees, found
    assert "full:" not in caplog.text


def test_a_difference_is_a_warning(
    config: DrafterTrainConfig,
    target: FrozenTarget,
    held_out: AnswerSet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine in which no draft is accepted."""
    answers = served._as_answers([held_out.token_ids_NL[0, :40].tolist()], [held_out.token_ids_NL[0, 40:60].tolist()])
    monkeypatch.setattr(served, "_serve", lambda *_: (answers, answers.num_answer_tokens - 1))
    with caplog.at_level(logging.WARNING):
        found = check_served(config, FULL, target, held_out)
    assert found is not None
    assert found.served == 1.0
    assert f"full: {found} differ by more than 3%" in caplog.text


def test_an_engine_that_fails_leaves_the_drafter(
    config: DrafterTrainConfig,
    target: FrozenTarget,
    held_out: AnswerSet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rayspec.farm.runtime import EngineFailed

    def fail(*_: object) -> None:
        raise EngineFailed("no memory")

    monkeypatch.setattr(served, "_serve", fail)
    assert check_served(config, FULL, target, held_out) is None
    assert "full: was trained, but not served by SGLang: no memory" in caplog.text
    none = replace(config, evaluation=EvaluationConfig(served_prompts=0))
    assert check_served(none, FULL, target, held_out) is None
