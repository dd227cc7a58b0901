"""What configs/train makes can be made at SmolLM2's sizes, and every sweep of configs/sweep plans on it."""

from pathlib import Path

import pytest
from planned_home import CONFIGS, make_calibrations, make_drafter, make_target, planned_home

from rayspec.calibration.config import CalibrationConfig
from rayspec.config import load_config
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import prepare
from rayspec.sweep.plan.sampling import check_drafts_are_said
from rayspec.training.drafter_config import DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget

SWEEPS = sorted((CONFIGS / "sweep").glob("*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> object:
    """One in which all of these trainings and calibrations have been done."""
    with planned_home(tmp_path_factory.mktemp("home")) as folder:
        target = FrozenTarget.without_weights(make_target(folder))
        make_calibrations(folder, target, load_config(CalibrationConfig, CONFIGS / "calibrate" / "smollm2.yaml"))
        for file in sorted((CONFIGS / "train").glob("*.yaml")):
            config = load_config(DrafterTrainConfig, file)
            for entry in config.drafters:
                try:
                    make_drafter(folder, target, entry, config)
                except ValueError as error:
                    raise ValueError(f"{file.name}, {entry.name}: {error}") from error
        yield folder


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_a_sweep_is_planned(file: Path) -> None:
    config = load_config(SweepConfig, file)
    prepared = prepare(config)
    check_drafts_are_said(config, prepared.plan.candidates)
    assert {c.label: c.problem for c in prepared.plan.candidates if c.problem} == {}
    assert "warning" not in prepared.describe()
