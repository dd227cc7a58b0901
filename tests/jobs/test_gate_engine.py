"""The command `rayspec gate` on two drafters, which are swapped in an engine."""

import json
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, PROMPTS, TARGET

from rayspec.cli import main

pytestmark = pytest.mark.slow


def test_two_drafters_in_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of one name, of which the candidate's has another head: both are measured, each with its own tau, and
    their greedy outputs are the same. The time is so short that the verdict is not asked for."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    for folder, kind in (("old", "full"), ("new", "slimspec")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "drafter").symlink_to(DRAFTERS[kind])
    file = tmp_path / "gate.json"
    settings = [f"target={TARGET}", f"workload={PROMPTS}:24", "max_new_tokens=12", "engine.num_threads=1"]
    settings += ["engine.context_length=1024", "engine.max_total_tokens=8192", "speed_loss=0.9", "tau_loss=0.9"]
    sides = [str(tmp_path / folder / "drafter") for folder in ("old", "new")]
    assert main(["gate", *sides, "--max-minutes", "20", "--json", str(file), *settings]) in (0, 1)
    found = json.loads(file.read_text())
    assert found["rounds"] >= 12
    assert found["compared"] == found["prompts"] == 24
    assert found["mismatches"] == []
    tau = found["tau"]
    assert 1 < tau["candidate"] < tau["baseline"] or 1 < tau["baseline"] < tau["candidate"], (
        "two drafters, not one twice"
    )
    assert "greedy outputs: 0 of 24 prompts differ" in capsys.readouterr().out
