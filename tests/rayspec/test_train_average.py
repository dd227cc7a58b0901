"""`recipe.ema`: the average of the weights is exported, and survives a kill."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_drafter import FULL, RECIPE, answers, run_config
from torch import Tensor, nn

from rayspec.training.averaging import WeightAverage, averaged
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from sglang_ext.drafters.checkpoint import load_drafter

__all__ = ["answers"]  # a fixture

DECAY = 0.5


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Tensor]]]:
    """The parameters behind every update, in the order of the average's own list."""
    behind: list[list[Tensor]] = []
    step = WeightAverage.step

    def recording(self: WeightAverage, closure: object = None) -> None:
        step(self)
        behind.append([p.detach().clone() for group in self.param_groups for p in group["params"]])

    with monkeypatch.context() as patch:
        patch.setattr(WeightAverage, "step", recording)
        yield behind


def test_the_average_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    values = torch.randn(20, 3)
    parameter = nn.Parameter(values[0].clone())
    average = WeightAverage([parameter], decay=0.9)
    expected = values[0].clone()
    for t, value in enumerate(values, start=1):
        parameter.data.copy_(value)
        average.step()
        d = min(0.9, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * value
    with averaged([average]):
        torch.testing.assert_close(parameter.data, expected)
    torch.testing.assert_close(parameter.data, values[-1])


def test_the_average_is_exported(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(tmp_path, recipe=replace(RECIPE, ema=DECAY), drafters=[FULL])
    with recorded(monkeypatch) as behind:
        train_drafter(config, FULL, tiny_target, answers, answers)
    assert len(behind) == RECIPE.num_steps
    expected = [p.clone() for p in behind[0]]
    for t, parameters in enumerate(behind, start=1):
        d = min(DECAY, (1 + t) / (10 + t))
        expected = [d * e + (1 - d) * p for e, p in zip(expected, parameters, strict=True)]
    exported, _ = load_drafter(config.output_folder / "full")
    found = [p for p in exported.parameters() if p.requires_grad]
    assert len(found) == len(expected)
    for own, average in zip(found, expected, strict=True):
        assert torch.equal(own.bfloat16(), average.bfloat16())
    assert any(not torch.equal(own.bfloat16(), last.bfloat16()) for own, last in zip(found, behind[-1], strict=True))


def test_a_resumed_run_has_the_same_average(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(step: int) -> None:
        if step == 5:  # behind the checkpoint of step 4
            raise Killed

    recipe = replace(RECIPE, ema=DECAY)
    whole, cut = (run_config(tmp_path / name, recipe=recipe, drafters=[FULL]) for name in ("whole", "cut"))
    train_drafter(whole, FULL, tiny_target, answers, answers)
    with pytest.raises(Killed):
        train_drafter(cut, FULL, tiny_target, answers, answers, on_step=kill)
    train_drafter(cut, FULL, tiny_target, answers, answers)
    weights = [(config.output_folder / "full" / "model.safetensors").read_bytes() for config in (whole, cut)]
    assert weights[0] == weights[1]


def test_an_average_that_is_off_is_not_named() -> None:
    assert "ema" not in Recipe().to_dict()
    assert Recipe(ema=0.99).to_dict()["ema"] == 0.99


@pytest.mark.parametrize("ema", [-0.1, 1.0, float("nan")])
def test_a_decay_that_is_none(ema: float) -> None:
    with pytest.raises(ValueError, match=r"recipe\.ema must be in \[0, 1\)"):
        Recipe(ema=ema)
