"""Drafters and champions as sides of a gate, as far as that goes without an engine."""

import dataclasses
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, PROMPTS, TARGET
from published import promoted, publish
from synthetic import few_trials, make_synthetic_sweep

from rayspec.gate.config import GateConfig
from rayspec.gate.engines import prepare_drafters
from rayspec.sweep.config import EngineConfig
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import Tracker

CONFIG = GateConfig(target=str(TARGET), workload=f"{PROMPTS}:24")


@pytest.fixture
def champion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", (tmp_path / "artifacts").as_uri())
    sweep = few_trials(make_synthetic_sweep(), target=str(TARGET))
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    return f"models:/{promoted(stored, tmp_path / 'report').model}@champion"


def test_a_champion_brings_its_settings_and_is_compared_under_them(champion: str) -> None:
    base, own = prepare_drafters(dataclasses.replace(CONFIG, target=None), [champion, champion])
    settings = base.prepared.config
    assert settings.draft_steps == [base.cohort.draft_steps] != [3]
    assert base.prepared.target == str(TARGET)
    assert base.shares_engine_with(own)
    three, _ = prepare_drafters(dataclasses.replace(CONFIG, draft_steps=3), [champion, champion])
    assert three.prepared.config.draft_steps == [3]
    assert not three.shares_engine_with(base)


def test_a_folder_beside_a_champion_is_measured_with_its_settings(champion: str) -> None:
    for sources in ([champion, str(DRAFTERS["slimspec"])], [str(DRAFTERS["slimspec"]), champion]):
        base, own = prepare_drafters(dataclasses.replace(CONFIG, target=None), sources)
        assert base.prepared.config.draft_steps == own.prepared.config.draft_steps != [3]
        assert base.shares_engine_with(own)


def test_folders_of_one_name_are_two_drafters(tmp_path: Path) -> None:
    for folder, kind in (("old", "full"), ("new", "slimspec")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "drafter").symlink_to(DRAFTERS[kind])
    base, own = prepare_drafters(CONFIG, [str(tmp_path / f / "drafter") for f in ("old", "new")])
    assert base.shares_engine_with(own)
    assert (base.measured.label, own.measured.label) == ("baseline", "candidate")  # a swap is skipped by label
    assert base.measured.path != own.measured.path


def test_the_engines_time_is_that_of_the_gate() -> None:
    config = dataclasses.replace(CONFIG, max_minutes=2.0, engine=EngineConfig(start_timeout_s=60))
    base, _ = prepare_drafters(config, [str(DRAFTERS["full"])] * 2)
    engine = base.prepared.config.engine
    assert (engine.start_timeout_s, engine.block_timeout_s) == (60, 120)


def test_a_drafter_that_cannot_be_measured_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no drafter can be measured: broken"):
        prepare_drafters(CONFIG, [str(DRAFTERS["full"]), str(broken)])
