"""A sweep's folder: who may go on with it, and with what."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disks import fill, small_disk
from fixture_models import DRAFTERS, PROMPTS, TARGET
from mlflow import MlflowClient

from rayspec.commands.sweep import main
from rayspec.driver.controller import close_cut_off
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import Prepared, prepare
from rayspec.sweep.record.folder import SweepFolder, find_resumable, find_same, sweep_folders
from rayspec.tracking import Tracker


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    drafter = tmp_path / "drafters" / "own"
    shutil.copytree(DRAFTERS["slimspec"], drafter)
    settings = {"target": str(TARGET), "drafters": [str(drafter)], "baseline": "own", "workload": f"{PROMPTS}:4"}
    return prepare(SweepConfig(name="my sweep", **settings))


def test_the_stored_config_is_the_resolved_one(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "rayspec sweep")
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


def test_a_sweep_is_found_by_its_settings(tmp_path: Path, prepared: Prepared) -> None:
    """All of them: a sweep of the same name is another with one more pass. One that cannot be read is left out."""
    assert find_same(tmp_path, prepared.config) is None
    old = SweepFolder.create(tmp_path, prepared, "")
    os.utime(old.path / "config.yaml", (1, 1))
    new = SweepFolder.create(tmp_path, prepared, "")
    for folder in (new, old):
        found = find_same(tmp_path, prepared.config)
        assert found is not None
        assert found.id == folder.id
        assert find_same(tmp_path, replace(prepared.config, repeats=2)) is None
        (folder.path / "config.yaml").write_text("nonsense: 1")
    assert find_same(tmp_path, prepared.config) is None


def test_once_measures_nothing_where_it_has_ended(
    tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    c = prepared.config
    settings = [f"{name}={getattr(c, name)}" for name in ("name", "target", "baseline", "workload")]
    settings += [f"drafters=[{c.drafters[0]}]", "--once"]
    assert main([*settings, "--plan"]) == 0
    assert "resuming" not in capsys.readouterr().out
    folder = SweepFolder.create(tmp_path, prepared, "")
    assert main([*settings, "--plan"]) == 0
    assert f"resuming {folder.id}" in capsys.readouterr().out
    folder.set_ended()
    for plan in ([], ["--plan"]):
        assert main([*settings, *plan]) == 0
        assert capsys.readouterr().out == f"{folder.id} has ended with these settings: nothing to measure\n"
    assert main([*settings, "repeats=2", "--plan"]) == 0
    assert "2 trials. Every trial answers 4 prompts" in capsys.readouterr().out
    assert [f.id for f in sweep_folders(tmp_path)] == [folder.id]
    with pytest.raises(SystemExit):
        main(["--once", "--resume"])
    assert "--resume takes the stored config" in capsys.readouterr().err


def test_changed_weights_and_prompts_are_refused(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "")
    with pytest.raises(ValueError, match=r"cannot go on: the prompts .*heldout_python.jsonl:4 changed"):
        folder.check(replace(prepared, prompts=prepared.prompts[::-1]))
    weights = Path(prepared.plan.candidates[0].path) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot go on: the drafters own changed .* start a new sweep"):
        folder.check(prepared)


def test_a_drafter_that_shares_another_body_is_refused(
    tmp_path: Path, prepared: Prepared, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own weights are what they were."""
    drafter, body = (tmp_path / "drafters" / name for name in ("truncated", "full"))
    for path in (drafter, body):
        shutil.copytree(DRAFTERS[path.name], path)
    own = prepare(replace(prepared.config, drafters=[str(drafter)], baseline="truncated"))
    folder = SweepFolder.create(tmp_path, own, "")
    assert set(folder.drafter_tags()["truncated"]) == {"drafter.sha256", "drafter.whole_sha256"}
    with (body / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match=r"cannot go on: the drafter folders truncated changed .* start a new sweep"):
        folder.check(own)
    assert not caplog.messages
    manifest = folder.manifest()
    del manifest["drafter folders"]  # as sweeps were begun before
    (folder.path / "manifest.json").write_text(json.dumps(manifest))
    folder.check(own)
    assert "began before the drafter folders had a fingerprint" in caplog.text
    assert set(folder.drafter_tags()["truncated"]) == {"drafter.sha256"}


def test_a_changed_target_is_refused(tmp_path: Path, prepared: Prepared, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    shutil.copytree(TARGET, target)
    own = replace(prepared, target=str(target))
    folder = SweepFolder.create(tmp_path, own, "")
    (target / "README.md").write_text("another card")
    folder.check(own)
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot go on: the target model\.safetensors changed .* start a new sweep"):
        folder.check(own)
    assert not caplog.messages
    manifest = folder.manifest()
    del manifest["target"]  # as sweeps were begun before
    (folder.path / "manifest.json").write_text(json.dumps(manifest))
    folder.check(own)
    assert "began before the target had a fingerprint" in caplog.text


def test_a_damaged_journal_is_refused_before_anything_starts(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "")
    folder.journal.write_text('{"event": "ended", "cohort": "s4", "reason": "measured", "time": 1}\n{"eve\n')
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2, is no event"):
        folder.check(prepared)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no config": lambda d: (d / "config.yaml").unlink(),
    "an older config": lambda d: (d / "config.yaml").write_text("heads: [full]\n"),
    "a config that is no text": lambda d: (d / "config.yaml").write_bytes(b"\xff\xfe\x00"),
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "half a manifest": lambda d: (d / "manifest.json").write_text('{"command":'),
    "a manifest that is a list": lambda d: (d / "manifest.json").write_text("[]"),
    "no lock": lambda d: (d / "lock").unlink(),
    "nothing": lambda d: (shutil.rmtree(d), d.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_blocks_no_other(
    name: str, tmp_path: Path, prepared: Prepared, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (SweepFolder.create(tmp_path, prepared, "") for _ in range(2))
    good.set_run_id("0123")
    DAMAGE[name](bad.path)
    for wanted in (good.id, "0123"):
        assert find_resumable(tmp_path, wanted).id == good.id
    if name == "no lock":  # which comes back by itself
        return
    for wanted in (None, "my sweep"):
        assert find_resumable(tmp_path, wanted).id == good.id
    assert f"left out because it cannot be read: sweep {bad.id} cannot go on: " in caplog.text
    assert find_resumable(tmp_path, bad.id).id == bad.id
    with pytest.raises(ValueError, match=f"sweep {bad.id} cannot go on: "):
        bad.check(replace(prepared, config=bad.config()))
    good.set_ended()
    with pytest.raises(ValueError, match=rf"no sweep to resume .* newest first: {bad.id}"):
        find_resumable(tmp_path)


def test_a_sweep_that_runs_is_not_resumed_beside_itself(tmp_path: Path, prepared: Prepared) -> None:
    folder = SweepFolder.create(tmp_path, prepared, "")
    with folder.locked():
        for wanted in (None, folder.id, "my sweep"):
            with pytest.raises(
                ValueError, match=rf"{folder.id} is running \(process {os.getpid()}\), so there is noth"
            ):
                find_resumable(tmp_path, wanted)


def test_a_sweep_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, prepared: Prepared) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        SweepFolder.create(disk, prepared, "first")
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            SweepFolder.create(disk, prepared, "x" * 100_000)
        ballast.unlink()
        assert [f.manifest()["command"] for f in sweep_folders(disk)] == ["first"]
        assert len(list((disk / "sweeps").iterdir())) == 1


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
    assert client.get_run(gone_runs[0]).data.tags["resume"] == f"rayspec sweep --resume {gone.id}"
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
