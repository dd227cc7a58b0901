"""The command `rayspec`, as it is installed and as the scripts of jobs/ call it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rayspec.cli import COMMANDS, main, module_of
from rayspec.config import load_config
from rayspec.gate.config import GateConfig
from rayspec.serving.rollover import RolloverSettings
from rayspec.serving.scale import Scale
from rayspec.sweep.config import SweepConfig

ROOT = Path(__file__).parents[2]
SCRIPTS = {"fetch_target": "fetch"}  # the others have the name of their command


def test_every_command_is_there_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {f.stem for f in (ROOT / "rayspec" / "commands").glob("[!_]*.py")}
    assert modules == {name.replace("-", "_") for name in COMMANDS}
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said and what in said for name, what in COMMANDS.items())


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_those_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: rayspec {name} " in capsys.readouterr().out
    assert f": rayspec {name} " in (module_of(name).__doc__ or "")


def test_help_names_the_defaults_that_hold(capsys: pytest.CaptureFixture[str]) -> None:
    gate, scale, rollover = GateConfig(), Scale(), RolloverSettings()
    defaults = {
        "gate": {"--tau-loss": gate.tau_loss, "--speed-loss": gate.speed_loss, "--max-minutes": gate.max_minutes},
        "serve": {
            "--requests-each": scale.requests_each,
            "--scale-down-seconds": scale.scale_down_s,
            "--drain-seconds": scale.drain_s,
            "--poll-seconds": rollover.poll_s,
            "--watch-seconds": rollover.watch_s,
        },
    }
    for name, options in defaults.items():
        with pytest.raises(SystemExit):
            main([name, "--help"])
        said = " ".join(capsys.readouterr().out.partition("options:")[2].split())
        for option, value in options.items():
            assert re.search(rf"{option} [A-Z]+ [^-]*\({value:g}\)", said), (option, value)


@pytest.mark.parametrize("arguments", [[], ["sweeep"], ["--plan"]])
def test_what_is_no_command_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_scripts_for_ray_jobs_are_the_commands() -> None:
    scripts = {f.stem: f.read_text() for f in (ROOT / "jobs").glob("*.py") if f.stem != "gpu_suite"}
    for stem, text in scripts.items():
        name = SCRIPTS.get(stem, stem)
        assert name in COMMANDS
        assert f'script("{name}")' in text
    done = subprocess.run(
        [sys.executable, "jobs/fetch_target.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: rayspec fetch ")


def test_shipped_configs_are_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = load_config(SweepConfig, "configs/sweep/demo.yaml")
    (tmp_path / "configs" / "sweep").mkdir(parents=True)
    (tmp_path / "configs" / "sweep" / "demo.yaml").write_text("name: my own\n")
    assert load_config(SweepConfig, "configs/sweep/demo.yaml").name == "my own" != shipped.name
    with pytest.raises(ValueError, match=r"no config file at configs/sweep/nowhere\.yaml"):
        load_config(SweepConfig, "configs/sweep/nowhere.yaml")


def test_a_wheel_brings_configs_and_assets(tmp_path: Path) -> None:
    """Built as pip builds it, from a copy, in which it leaves a folder."""
    copy = shutil.copytree(
        ROOT, tmp_path / "copy", symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "tests")
    )
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path]
    subprocess.run([*command, copy], check=True)
    (wheel,) = tmp_path.glob("rayspec-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = {f"rayspec/{f.relative_to(ROOT)}" for f in (ROOT / "configs").rglob("*.yaml")}
    assert tracked <= held
    assert any(name.startswith("rayspec/assets/drafters/") for name in held)
    assert any(name.endswith("entry_points.txt") for name in held)
