"""A real sweep that is interrupted at every stage, whose disk fills up, whose Ray node dies, whose journal is damaged.

One test, in whose sweep one stage follows the other, since engine starts are what takes the time; home, MLflow store
and journal lie on the small disk. At the end nothing is lost, doubled or left open.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from disks import fill, small_disk
from fixture_models import PROMPTS as HELD_OUT
from sweeps import PATIENCE_S, SETTINGS, Sweep, assert_complete_and_once

from rayspec.farm.processes import has_ended
from rayspec.sweep.record.events import CohortEnded
from rayspec.sweep.record.folder import sweep_folders
from rayspec.sweep.record.journal import read

pytestmark = pytest.mark.slow
PROMPTS, PASSES = 6, 16  # enough to last until the disk is full, however busy the machine
OWN = [*SETTINGS, f"workload={HELD_OUT}:{PROMPTS}", f"repeats={PASSES}", "name=disasters"]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    with small_disk(tmp_path / "disk", 48) as disk:
        made = Sweep(home=disk / "home", uri=f"sqlite:///{disk}/mlflow.db", log=tmp_path / "output.log")
        try:
            yield made
        finally:
            made.process.kill()


def assert_cut_off(sweep: Sweep, status: int) -> None:
    """Said how to go on, without a traceback; no run left open, no process left."""
    assert status == 130
    assert f"cut off; to go on: rayspec sweep --resume {sweep.folder.id}" in sweep.said
    assert_closed(sweep)


def assert_closed(sweep: Sweep) -> None:
    assert "Traceback" not in sweep.said
    runs = sweep.runs()
    assert {r.info.status for r in runs} <= {"FAILED", "FINISHED"}
    (parent,) = (r for r in runs if r.data.tags["kind"] == "sweep")
    assert parent.data.tags["resume"] == f"rayspec sweep --resume {sweep.folder.id}"
    # Ray's agents look for their control service for a minute before they give up
    _, left = psutil.wait_procs(sweep.orphans, timeout=120)
    assert [p for p in left if not has_ended(p)] == []


def ctrl_c_before_anything_has_begun(sweep: Sweep) -> None:
    sweep.start(*OWN)
    sweep.wait_until("imports", lambda: "torch" in Path(f"/proc/{sweep.process.pid}/maps").read_text())
    assert sweep.interrupt() == 130
    assert "cut off" in sweep.said
    assert "Traceback" not in sweep.said
    assert sweep_folders(sweep.home) == []


def ctrl_c_while_ray_starts(sweep: Sweep) -> None:
    sweep.start(*OWN)
    sweep.wait_until("Ray starts", lambda: sweep.has_descendant("gcs_server"))
    assert_cut_off(sweep, sweep.interrupt())


def ctrl_c_while_engines_start(sweep: Sweep) -> None:
    sweep.start("--resume")
    sweep.wait_until("engines start", lambda: sweep.has_descendant("sglang::scheduler"))
    assert_cut_off(sweep, sweep.interrupt())
    assert sweep.rounds() == 0


def a_second_one_is_not_resumed_beside_the_first(sweep: Sweep) -> None:
    sweep.start("--resume")
    sweep.wait_for_rounds(2)
    beside = Sweep(home=sweep.home, uri=sweep.uri, log=sweep.log.with_name("beside.log"))
    for wanted in ([], [sweep.folder.id]):
        beside.start("--resume", *wanted)
        assert beside.process.wait(PATIENCE_S) == 2
        assert f"{sweep.folder.id} is running (process {sweep.process.pid}), so there is nothing" in beside.said


def a_disk_that_is_full_for_a_while_only_costs_time(sweep: Sweep) -> None:
    ballast = fill(sweep.home.parent)
    sweep.wait_until("told", lambda: "Measuring waits until there is room" in sweep.said)
    before = sweep.rounds()
    time.sleep(5)
    assert sweep.rounds() == before
    ballast.unlink()
    sweep.wait_for_rounds(before + 2)


def the_death_of_the_ray_node_is_told_and_closed(sweep: Sweep) -> None:
    sweep.note_orphans()
    sweep.descendant("raylet/raylet").kill()
    assert sweep.process.wait(PATIENCE_S) == 2
    assert "error: this machine's Ray node is gone: its raylet process has ended" in sweep.said
    assert f"when that is mended: rayspec sweep --resume {sweep.folder.id}" in sweep.said
    assert_closed(sweep)


def ctrl_c_while_measuring(sweep: Sweep) -> None:
    sweep.start("--resume")
    sweep.wait_for_rounds(sweep.rounds() + 2)
    assert_cut_off(sweep, sweep.interrupt())


def a_damaged_journal_is_named_and_mended(sweep: Sweep) -> None:
    journal = sweep.folder.journal
    lines = journal.read_bytes().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if b'"round"' in line)
    journal.write_bytes(b"".join([*lines[:number], lines[number][:50] + b"\n", *lines[number + 1 :]]))
    sweep.start("--resume")
    assert sweep.process.wait(PATIENCE_S) == 2
    assert f"error: {journal}, line {number + 1}, is no event of this sweep" in sweep.said
    journal.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def two_sweeps_in_one_home_end_well_and_ctrl_c_at_the_end_too(sweep: Sweep) -> None:
    first = sweep.folder
    sweep.start("--resume")
    sweep.wait_until("Ray runs", lambda: sweep.has_descendant("ray::"))
    other = Sweep(home=sweep.home, uri=sweep.uri, log=sweep.log.with_name("other.log"))
    other.start(*OWN, "repeats=1", "name=other")
    sweep.wait_until("measured", lambda: any(isinstance(e, CohortEnded) for e in read(first.journal)))
    status = sweep.interrupt()  # while it publishes
    if status == 130:
        sweep.start("--resume", first.id)
        assert sweep.process.wait(PATIENCE_S) == 0, sweep.said
    other.finish()
    assert_complete_and_once(sweep, first, PROMPTS * PASSES)
    assert_complete_and_once(other, other.folder, PROMPTS)
    assert shutil.disk_usage(sweep.home).free > 0


STAGES = (
    ctrl_c_before_anything_has_begun,
    ctrl_c_while_ray_starts,
    ctrl_c_while_engines_start,
    a_second_one_is_not_resumed_beside_the_first,
    a_disk_that_is_full_for_a_while_only_costs_time,
    the_death_of_the_ray_node_is_told_and_closed,
    ctrl_c_while_measuring,
    a_damaged_journal_is_named_and_mended,
    two_sweeps_in_one_home_end_well_and_ctrl_c_at_the_end_too,
)


def test_a_sweep_that_meets_all_of_it_loses_nothing(sweep: Sweep) -> None:
    for stage in STAGES:
        print(stage.__name__, flush=True)  # which one it was, should it fail
        stage(sweep)
