"""`make drafters` trains all but further trainings, each config behind those that make what it names."""

import os
import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
OF_ONE_DRAFTER = {"users", "many_openings"}  # further trainings of `full`, which stand on the drafter that ships


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """Without the programs of the environment, so that nothing is trained whatever happens."""
    command = ["make", *words, "BIN=/nowhere", "STAMP="]
    without = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=without)


def test_every_drafter_finds_what_it_stands_on() -> None:
    said = make("--dry-run", "drafters", "RAYSPEC_HOME=/nowhere").stdout
    configs = re.findall(r"--config (configs/(?:train|calibrate)/\w+\.yaml)", said)
    trained = {Path(config).stem for config in configs if "/train/" in config}
    assert trained == {file.stem for file in (ROOT / "configs" / "train").glob("*.yaml")} - OF_ONE_DRAFTER
    drafters, calibrations = set[str](), set[str]()
    for config in configs:
        found = yaml.safe_load((ROOT / config).read_text())
        for drafter in found.get("drafters", []):
            assert {drafter["base"]} <= drafters if "base" in drafter else True, (config, drafter)
            named = {drafter.get("artifacts"), drafter.get("tree", {}).get("bigram")} - {None}
            assert named <= calibrations, (config, drafter)
            assert drafter["name"] not in drafters, "one home refuses to train another one of its name"
            drafters.add(drafter["name"])
        for calibration in found.get("calibrations", []):
            calibrations.add(calibration["name"])
            source = found["sources"][calibration["source"]] if "sources" in found else {}
            for named in (source, calibration["rule"]):
                assert named.get("drafter", "full") in drafters, (config, calibration)


def test_a_home_must_be_named() -> None:
    ended = make("drafters", "RAYSPEC_HOME=")
    assert ended.returncode == 2
    assert "make drafters RAYSPEC_HOME=FOLDER" in ended.stdout
