"""The tests' models are those of their recipes: whoever changes one runs tests/fixtures/make.sh again."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from fixture_models import CALIBRATIONS, FIXTURES, PROMPTS, TARGET
from fixtures.target_trainer.config import TargetTrainConfig
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from rayspec.artifacts import load_artifacts
from rayspec.calibration.config import CalibrationConfig
from rayspec.config import load_config
from rayspec.training.drafter_config import DrafterTrainConfig
from rayspec.training.drafter_runs import is_exported
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from sglang_ext.drafters.checkpoint_config import read_info

MAX_BYTES = 10 * 2**20
RECIPES = ("drafters.yaml", "heads.yaml")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(FIXTURES.parents[1])  # the recipes' paths
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))


def training(recipe: str) -> DrafterTrainConfig:
    return load_config(DrafterTrainConfig, FIXTURES / recipe)


def test_the_target_is_its_recipe_s() -> None:
    wanted = OmegaConf.to_container(OmegaConf.structured(load_config(TargetTrainConfig, FIXTURES / "target.yaml")))
    assert OmegaConf.to_container(OmegaConf.load(TARGET / "recipe.yaml")) == wanted


def test_the_drafters_are_their_recipes() -> None:
    sha256, made = target_sha256(TARGET), set()
    for recipe in RECIPES:
        config = training(recipe)
        assert config.target_folder == str(TARGET)
        for head in config.drafters:
            assert is_exported(config, head, sha256), f"{head.name} is missing"
            trained_on = read_info(config.output_folder / head.name).provenance["trained_on"]
            assert trained_on["sequences"] == config.answers.count
            made.add((head.name, trained_on["sha256"]))
    assert {name for name, _ in made} == {folder.name for folder in (FIXTURES / "drafters").iterdir()}
    assert len({answers for _, answers in made}) == 1, "all were trained on the same answers"


def test_both_trainings_ask_for_the_same_answers() -> None:
    first, second = map(training, RECIPES)
    assert (first.answers, first.held_out) == (second.answers, second.held_out)


def test_the_calibrations_are_their_recipe_s() -> None:
    config = load_config(CalibrationConfig, FIXTURES / "calibrations.yaml")
    target = FrozenTarget.load(TARGET, torch.float32)
    assert {c.name for c in config.calibrations} == {folder.name for folder in CALIBRATIONS.iterdir()}
    for calibration in config.calibrations:
        _, found = load_artifacts(CALIBRATIONS / calibration.name, target.info(), target.eos_ids)
        assert found["rule"] == calibration.entry


def test_the_prompts_were_cut_with_the_target_s_tokenizer() -> None:
    config = load_config(TargetTrainConfig, FIXTURES / "target.yaml")
    assert len(AutoTokenizer.from_pretrained(TARGET)) == config.model.vocab_size
    assert len(PROMPTS.read_text().splitlines()) == 200


def test_all_of_it_is_small() -> None:
    sizes = [file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file() and file.suffix != ".png"]
    assert sum(sizes) < MAX_BYTES


def test_make_sh_runs_every_recipe(tmp_path: Path) -> None:
    """In a copy of the folders, with an interpreter that says what it is asked."""
    place = tmp_path / "tests" / "fixtures"
    place.mkdir(parents=True)
    shutil.copy(FIXTURES / "make.sh", place)
    command, asked = ["sh", str(place / "make.sh")], {**os.environ, "PYTHON": "echo"}
    said = subprocess.run(command, env=asked, capture_output=True, text=True, check=True).stdout.splitlines()
    here = "tests/fixtures"
    assert said == [
        f"-m fixtures.target_trainer {here}/target.yaml",
        f"{here}/prompts.py",
        f"-m rayspec.cli train --config {here}/drafters.yaml",
        f"-m rayspec.cli calibrate --config {here}/calibrations.yaml",
        f"-m rayspec.cli train --config {here}/heads.yaml",
    ]
