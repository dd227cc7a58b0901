"""The tests' models are those of their recipes: whoever changes one runs tests/fixtures/make.sh again."""

import os
import shutil
import subprocess
from math import log
from pathlib import Path

import pytest
import torch
from documents import make_document
from fixture_models import CALIBRATIONS, FIXTURES, PROMPTS, TARGET, prompt_texts
from fixtures.target import Recipe, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayspec.artifacts import load_artifacts
from rayspec.calibration.config import CalibrationConfig
from rayspec.config import load_config, to_yaml
from rayspec.training.data.sources import STDLIB, CorpusConfig
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
    assert (TARGET / "recipe.yaml").read_text() == to_yaml(Recipe())


def test_the_target_predicts_held_out_python() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TARGET), AutoTokenizer.from_pretrained(TARGET)
    nats = []
    for text in prompt_texts(8):
        tokens = torch.tensor([tokenizer.encode(text)])
        nats.append(float(model(tokens, labels=tokens).loss.detach()))
    assert sum(nats) / len(nats) < 6.5  # ln 4096 = 8.3 for a model that knows nothing


def test_a_target_learns_and_loads(tmp_path: Path) -> None:
    """By its recipe, at toy size."""
    recipe = Recipe(
        corpus=CorpusConfig(min_bytes=10, held_out_percent=20),
        **{"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
        **{"intermediate_size": 48, "steps": 12, "warmup_steps": 2.0, "decay_steps": 4.0},
    )
    documents = [make_document(tmp_path, i, package) for package in (STDLIB, "pkg") for i in range(200)]
    (tmp_path / "target").mkdir()
    losses = make(recipe, documents, tmp_path / "target")
    assert losses[0] == pytest.approx(log(300), abs=0.1)  # knows nothing
    assert losses[-1] < 3.5
    assert FrozenTarget.load(tmp_path / "target", torch.float32).model.config.vocab_size == 300
    assert AutoTokenizer.from_pretrained(tmp_path / "target").encode("x = 1\n")


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
    assert len(AutoTokenizer.from_pretrained(TARGET)) == Recipe().vocab_size
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
        f"{here}/target.py",
        f"{here}/prompts.py",
        f"-m rayspec.cli train --config {here}/drafters.yaml",
        f"-m rayspec.cli calibrate --config {here}/calibrations.yaml",
        f"-m rayspec.cli train --config {here}/heads.yaml",
    ]
