"""A sweep's folder: who may go on with it, and with what."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, PROMPTS, TARGET
from mlflow import MlflowClient

from rayspec.sweep.config import SweepConfig
from rayspec.sweep.controller import close_cut_off
from rayspec.sweep.folder import SweepFolder, find_resumable
from rayspec.sweep.prepare import Prepared, prepare
from rayspec.tracking import Tracker


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    drafter = tmp_path / "drafters" / "own"
    shutil.copytree(DRAFTERS["slimspec"], drafter)
    settings = {"target": str(TARGET), "drafters": [str(drafter)], "baseline": "own", "workload": f"{PROMPTS}:4"}
    return prepare(SweepConfig(name="my sweep", **settings))


def test_the_stored_config_is_the_resolved_one(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "python jobs/sweep.py")
    assert folder.id.startswith("my_sweep-")
    assert folder.config() == prepared.config
    folder.check(prepared)


def test_the_newest_that_has_not_ended_goes_on(tmp_path: Path, prepared: Prepared) -> None:
    with pytest.raises(ValueError, match=r"no sweep to resume in .*; .* newest first: none"):
        find_resumable(tmp_path)
    old, new = (SweepFolder.create(tmp_path, prepared, "") for _ in range(2))
    new.set_run_id("0123")
    assert find_resumable(tmp_path).id in (old.id, new.id)
    assert find_resumable(tmp_path, "0123").id == new.id
    assert find_resumable(tmp_path, old.id).id == old.id
    assert find_resumable(tmp_path, "my sweep").id in (old.id, new.id)
    with new.locked():
        assert find_resumable(tmp_path).id == old.id
        with pytest.raises(ValueError, match=rf"sweep {new.id} is running \(process \d+\)"), new.locked():
            pass
    new.set_ended()
    assert find_resumable(tmp_path).id == old.id
    with pytest.raises(ValueError, match=rf"sweep {new.id} has ended, so nothing to resume .* first: {old.id}"):
        find_resumable(tmp_path, new.id)
    with pytest.raises(ValueError, match=r"no sweep to resume with id, run id or name 'other'"):
        find_resumable(tmp_path, "other")


def test_changed_weights_and_prompts_are_refused(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "")
    with pytest.raises(ValueError, match=r"cannot go on: the prompts .*heldout_python.jsonl:4 changed"):
        folder.check(replace(prepared, prompts=prepared.prompts[::-1]))
    weights = Path(prepared.drafters[0].path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot go on: the drafters own changed .* start a new sweep"):
        folder.check(prepared)


def test_runs_of_a_driver_that_is_gone_are_ended_with_the_way_on(tmp_path: Path, prepared: Prepared) -> None:
    """Killed, so that nothing of it could say anything: only the lock is free."""
    tracker = Tracker(f"sqlite:///{tmp_path}/mlflow.db", "tests", (tmp_path / "artifacts").as_uri())
    client = MlflowClient(tracker.uri)

    def cut_off_sweep() -> tuple[SweepFolder, list[str]]:
        folder = SweepFolder.create(tmp_path, prepared, "")
        tags = {"kind": "sweep", "sweep.id": folder.id}
        parent = client.create_run(tracker.experiment_id, tags=tags).info.run_id
        child = client.create_run(tracker.experiment_id, tags={"mlflow.parentRunId": parent}).info.run_id
        done = client.create_run(tracker.experiment_id, tags={"mlflow.parentRunId": parent}).info.run_id
        client.set_terminated(done, "FAILED")
        return folder, [parent, child, done]

    gone, gone_runs = cut_off_sweep()
    alive, alive_runs = cut_off_sweep()
    foreign = client.create_run(tracker.experiment_id, tags={"kind": "sweep", "sweep.id": "elsewhere-1"}).info.run_id
    with alive.locked():
        close_cut_off(tracker, gone.path.parent)
    assert [client.get_run(r).info.status for r in gone_runs] == ["KILLED", "KILLED", "FAILED"]
    assert client.get_run(gone_runs[0]).data.tags["resume"] == f"python jobs/sweep.py --resume {gone.id}"
    assert [client.get_run(r).info.status for r in [*alive_runs, foreign]] == [
        "RUNNING",
        "RUNNING",
        "FAILED",
        "RUNNING",
    ]

    with tracker.parent("again", {}, run_id=gone_runs[0]) as run:  # as --resume does
        assert client.get_run(run.run_id).info.status == "RUNNING"
        assert "resume" not in client.get_run(run.run_id).data.tags
    assert json.loads((gone.path / "manifest.json").read_text())["command"] == ""
