"""SmolLM2's recipe: its files agree, and the sweep is planned with what they make."""

from pathlib import Path

import pytest
from planned_home import make_calibrations, make_drafter, make_shipped_drafter, make_target, make_workloads

from rayspec.calibration.config import CalibrationConfig
from rayspec.config import load_config
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import prepare
from rayspec.training.drafter_config import DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "recipes" / "smollm2-135m"


def test_the_sweep_is_planned_with_all_that_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    monkeypatch.setenv("RAYSPEC_DATA", str(tmp_path / "data"))
    make_workloads(tmp_path / "data")
    target = FrozenTarget.without_weights(make_target(tmp_path))
    make_shipped_drafter(tmp_path, target)
    make_calibrations(tmp_path, target, load_config(CalibrationConfig, RECIPE / "calibrate.yaml"))
    trainings = [load_config(DrafterTrainConfig, RECIPE / f"{n}.yaml") for n in ("train", "train_truncated", "heads")]
    assert len({repr((c.answers, c.held_out, c.recipe.num_steps, c.recipe.batch_size)) for c in trainings}) == 1
    made = {"full"}
    for config in trainings:
        for entry in config.drafters:
            assert entry.base in made
            make_drafter(tmp_path, target, entry, config)
            made.add(entry.name)
    sweep = load_config(SweepConfig, RECIPE / "sweep.yaml")
    assert set(sweep.drafters) == made
    plan = prepare(sweep).plan
    assert {c.label: c.problem for c in plan.candidates if c.problem} == {}
    assert len(plan.trials) == 5
