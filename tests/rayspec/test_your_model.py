"""docs/your-model.md: every command that it lists is planned here, read from the document itself."""

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from answerers import InTurn
from fixture_models import TARGET
from planned_home import make_calibrations, make_drafter, make_target, make_workloads
from published import promoted, publish
from synthetic import few_trials, make_synthetic_sweep
from test_recipes import MODELS, TRAIN, file_of, training

from rayspec.calibration.config import CalibrationConfig
from rayspec.cli import main
from rayspec.commands.recipe import steps_of
from rayspec.config import load_config
from rayspec.home import artifact_uri, prepared_home, tracking_uri
from rayspec.sweep.record.stored import find_sweep
from rayspec.targets.catalogue import hub_folder
from rayspec.tracking import Tracker
from rayspec.training.data.answers import AnswersConfig, Prompt, TargetName, make_answers
from rayspec.training.frozen_target import FrozenTarget, target_sha256

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "your-model.md").read_text()
BLOCKS = [block.strip() for block in re.findall(r"```sh\n(.*?)```", DOCUMENT, re.S)]
# the reader's own: the smaller drafter of the two recipes, since a plan reads a base's weights
VARIABLES = {
    "MODEL": training("qwen3-30b-a3b", "train").target,
    "RECIPE": str(ROOT / "configs" / "recipes" / "qwen3-30b-a3b"),
    "NAME": "my-model",
}
SAYS = {  # what the plan of each command must say, in the order of the document
    "fetch": "already at ",
    "train --config $RECIPE/train.yaml": "full-trained {'kind': 'full'} -> ",
    "calibrate": "vocabtrim-75968",
    "train --config $RECIPE/train_truncated.yaml": "vocabtrim-t-75968 {'kind': 'truncated', 'size': 75968} -> ",
    "train --config $RECIPE/heads.yaml": "vocabtrim-37984: trains nothing",
    "sweep": "| slimspec-r256-s6-c64 ",
    "report": "already champion of my-model: ",
    "serve": "--speculative-draft-model-path",
}


def commands(text: str) -> list[str]:
    """The lines of a script that begin with `rayspec`, without their comments."""
    return [
        re.sub(r"\s+#.*$", "", line).removeprefix("rayspec ").strip()
        for line in text.splitlines()
        if line.startswith("rayspec ")
    ]


LISTED = commands(BLOCKS[0])


def files(home: Path) -> set[Path]:
    """But MLflow's own, and what serving fetches from it to look at."""
    kept = (f for f in home.rglob("*") if f.is_file() and home / "champions" not in f.parents)
    return {f for f in kept if not f.name.startswith("mlflow.db")}


def expanded(command: str) -> list[str]:
    return shlex.split(re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], command))


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One in which all commands but training and calibrating have been run, and drafters lie where the sweep seeks."""
    folder, model = tmp_path_factory.mktemp("home"), "qwen3-30b-a3b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSPEC_HOME", str(folder))
        patch.setenv("RAYSPEC_DATA", str(folder / "data"))
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        make_workloads(folder / "data")
        target = FrozenTarget.without_weights(make_target(folder, hub_folder(VARIABLES["MODEL"]), MODELS[model]))
        make_calibrations(folder, target, load_config(CalibrationConfig, file_of(model, "calibrate")))
        for name in TRAIN:
            for entry in training(model, name).drafters:
                make_drafter(folder, target, entry, training(model, name))
        _answers(folder / "training" / "Qwen3-30B-A3B", target)
        _promote()
        yield folder


def _answers(folder: Path, target: FrozenTarget) -> None:
    """One made-up row, for the calibration to count; of the settings that the recipe asks for."""
    name = TargetName("Qwen3-30B-A3B", target_sha256(target.folder))
    settings = training("qwen3-30b-a3b", "train")
    sets: dict[str, AnswersConfig] = {"answers": settings.answers, "held_out": settings.held_out}
    for part, asked in sets.items():
        few = dataclasses.replace(asked, count=1, batch_size=1)
        said = InTurn(lambda requests: [[6, 7, 0] for _ in requests])
        make_answers(folder / part, name, few, [Prompt("a", [5] * 9)], said)


def _promote() -> None:
    prepared_home()
    tracker = Tracker(tracking_uri(), "rayspec-sweep", artifact_uri())
    sweep = few_trials(make_synthetic_sweep(), target=str(TARGET), name=VARIABLES["NAME"])
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    promoted(stored, prepared_home() / "report", VARIABLES["NAME"])


def test_the_document_lists_the_whole_sequence() -> None:
    assert [c.split()[0] for c in LISTED] == [key.split()[0] for key in SAYS]
    assert all(command.startswith(key) for command, key in zip(LISTED, SAYS, strict=True))
    assigned = dict(line.split("=", 1) for line in BLOCKS[0].splitlines() if re.match(r"[A-Z]+=", line))
    assert set(assigned) == set(VARIABLES)
    assert (ROOT / assigned["RECIPE"]).is_dir()
    assert assigned["MODEL"] == training("llama-3.1-8b-instruct", "train").target


@pytest.mark.parametrize("command", LISTED, ids=lambda c: " ".join(c.split()[:3]))
def test_each_command_is_planned(command: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(home)
    words = expanded(command)
    if words[0] in ("train", "calibrate"):  # what was made up was not made by them, and would be refused in its place
        words += [f"output_dir={home}/none-yet"]
    if words[0] == "train":
        words += [f"work_dir={home}/none-yet"]
    status = main([*words, "--plan"])
    said = capsys.readouterr()
    assert status == 0, said.err
    wanted = next(text for key, text in SAYS.items() if command.startswith(key))
    assert wanted in said.out
    assert files(home) == before, "a plan writes nothing"


def test_the_job_is_the_list() -> None:
    assert [" ".join(step) for step in steps_of("$MODEL", "$RECIPE", "$NAME")] == LISTED
    submitted = next(block for block in BLOCKS if block.startswith("ray job submit"))
    words = shlex.split(submitted.replace("\\\n", " "))
    given = words[words.index("--") + 1 :]
    assert given[:2] == ["python", "jobs/recipe.py"]
    assert given[2:] == [v for k, v in (line.split("=") for line in BLOCKS[0].splitlines()[:3])]


def test_the_steps_are_shown_before_anything_is_done(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["recipe", VARIABLES["MODEL"], VARIABLES["RECIPE"], VARIABLES["NAME"]]
    assert main([*given, "--plan"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"rayspec fetch {VARIABLES['MODEL']}"
    assert main(["recipe", "m", str(tmp_path), "n"]) == 2
    assert f"is no recipe: there is no {tmp_path}/train.yaml, " in capsys.readouterr().err


def test_a_champion_is_not_registered_twice(capsys: pytest.CaptureFixture[str]) -> None:
    command = expanded(next(c for c in LISTED if c.startswith("report")))
    assert main(command) == 0
    assert "models:/my-model@champion is still version 1: " in capsys.readouterr().out
    assert main([word for word in command if word != "--once"]) == 0
    assert "models:/my-model@champion is now version 2: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["report", "--once"])
    assert "--once belongs to --promote; add that" in capsys.readouterr().err
