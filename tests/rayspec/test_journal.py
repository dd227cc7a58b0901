"""The journal keeps what was written, once, whatever was cut off; and what its events say."""

import json
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from disks import small_disk
from synthetic import SyntheticSweep, synthetic_request

from rayspec.farm.load import Traffic
from rayspec.records import Measured, StepSeconds
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import make_plan
from rayspec.sweep.record.events import (
    CohortEnded,
    Event,
    HeadsTimed,
    RoundMeasured,
    TrialDropped,
    TrialFailed,
    from_line,
    to_line,
)
from rayspec.sweep.record.journal import Journal, lines, read
from rayspec.sweep.record.measured import SweepState, read_state

ROUND = RoundMeasured(cohort="s2", index=3, prompt_block=1, seconds=2.0, blocks={})
ENDED = CohortEnded(cohort="s2", reason="measured")


def indices(events: Iterable[Event]) -> list[int]:
    return [e.index for e in events if isinstance(e, RoundMeasured)]


def test_an_event_is_written_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(ROUND)
    journal.append(replace(ROUND, seconds=9.0))  # the same round by another measurement
    journal.append(ENDED)
    again = Journal(tmp_path / "journal.jsonl")
    again.append(ROUND)
    events = read(tmp_path / "journal.jsonl")
    assert [replace(e, time=0.0) for e in events] == [ROUND, ENDED]
    assert events[0].time > 1e9


def test_a_cohort_reads_its_own_events_and_those_of_the_sweep(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(ROUND)
    journal.append(HeadsTimed(latency_s={}))
    journal.append(replace(ROUND, cohort="s4", index=9))
    for j in (journal, Journal(tmp_path / "journal.jsonl")):
        assert [e.event for e in j.read("s2")] == ["round", "heads"]
        assert [e.event for e in j.read("s4")] == ["heads", "round"]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(ROUND)
    journal.append(replace(ROUND, index=4))
    path.write_bytes(path.read_bytes()[:-cut])
    assert indices(read(path)) == [3]
    again = Journal(path)
    again.append(replace(ROUND, index=4))
    assert indices(read(path)) == [3, 4]
    assert indices(again.read("s2")) == [3, 4]


def numbers(events: Iterable[Event]) -> list[int]:
    return [e.passes for e in events if isinstance(e, TrialDropped)]


def test_a_disk_that_was_full_for_a_moment_costs_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        journal, name = Journal(disk / "journal.jsonl"), "x" * 300_000
        for index in range(3):
            journal.append(TrialDropped(cohort="s2", trial=f"{name}{index}", passes=index))
        for again in (journal, journal, Journal(disk / "journal.jsonl")):
            with pytest.raises(OSError, match="No space left on device"):
                again.append(TrialDropped(cohort="s2", trial=f"{name}{3}", passes=3))
            assert "No space left on device" in str(again.refusal())
            assert (disk / "journal.jsonl").read_bytes().endswith(b"\n")
            assert numbers(read(disk / "journal.jsonl")) == [0, 1, 2]
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        for index in (3, 3, 2, 4):
            journal.append(TrialDropped(cohort="s2", trial=f"{name}{index}", passes=index))
        assert journal.refusal() is None
        assert numbers(read(disk / "journal.jsonl")) == [0, 1, 2, 3, 4]
        assert numbers(journal.read("s2")) == [0, 1, 2, 3, 4]


BAD_LINES = {
    "two in one": b'{"event": "rou{"event": "ended", "cohort": "s2", "time": 1}\n',
    "no text": b"\xff\xfe\n",
    "zeros": bytes(100) + b"\n",
    "an empty line": b"\n",
    "a number": b"3\n",
    "a list": b"[]\n",
    "another event": b'{"event": "rounds", "time": 1}\n',
    "no time": b'{"event": "ended", "cohort": "s2", "reason": ""}\n',
    "no reason": b'{"event": "ended", "cohort": "s2", "time": 1}\n',
    "an unknown field": b'{"event": "ended", "cohort": "s2", "reason": "", "when": 1, "time": 1}\n',
    "a cohort that is a list": b'{"event": "ended", "cohort": [], "reason": "", "time": 1}\n',
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(ROUND)
    path.write_bytes(path.read_bytes() + BAD_LINES[name] + path.read_bytes())
    for open_ in (Journal, read):
        with pytest.raises(
            ValueError, match=r"journal\.jsonl, line 2, is no event of this sweep .* take that line out"
        ):
            open_(path)


def test_a_line_of_another_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    plan = make_plan(SweepConfig(draft_steps=[2]), 4, [Candidate(label="full", path="/full", draft_steps=2)])
    assert read_state(plan, path).rounds == set()
    journal = Journal(path)
    journal.append(ROUND)
    assert read_state(plan, path).rounds == {3}
    journal.append(replace(ROUND, index=4, blocks={"nobody-c1": Measured(wall_s=1.0, requests=())}))
    with pytest.raises(ValueError, match=r"line 2, is no event of this sweep \(the plan has no 'nobody-c1'\)"):
        read_state(plan, path)


def test_lines_are_read_on_from_where_one_stopped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(ROUND)
    ((offset, _),) = lines(tmp_path / "journal.jsonl", 0)
    journal.append(replace(ROUND, index=4))
    assert indices(e for _, e in lines(tmp_path / "journal.jsonl", offset)) == [4]


STEPS = StepSeconds(steps=2, requests=3, verified_tokens=15, head_s=0.1, draft_s=0.2, verify_s=1 / 3)


COUNTED = replace(
    STEPS,
    choice_s=0.05,
    scoring_rows=3,
    scored_tokens=70,
    most_scored=30,
    scoring_rows_by_position=(1, 2),
    scored_tokens_by_position=(30, 40),
)


@pytest.mark.parametrize("steps", [None, STEPS, COUNTED])
def test_a_measurement_comes_back_exactly(steps: StepSeconds | None) -> None:
    request = synthetic_request("a", (3, 1, 2), 0.0123456789)
    measured = Measured(wall_s=1 / 3, requests=(request,), step_seconds=steps, peak_memory_bytes=5)
    event = replace(ROUND, blocks={"full-c1": measured})
    assert from_line(to_line(event, 2.5)) == replace(event, time=2.5)


def test_rounds_of_older_journals_are_read() -> None:
    """They say less of a block and of its steps."""
    measured = Measured(wall_s=1.0, requests=(), step_seconds=STEPS, other_cpu_share=0.25)
    event = json.loads(to_line(replace(ROUND, blocks={"full-c1": measured}), 2.5))
    block = event["blocks"]["full-c1"]
    del block["other_cpu_share"], block["step_seconds"]["choice_s"]
    for name in ("scoring_rows", "scored_tokens"):
        del block["step_seconds"][name], block["step_seconds"][f"{name}_by_position"]
    del block["step_seconds"]["most_scored"]
    read_back = from_line(json.dumps(event).encode())
    assert isinstance(read_back, RoundMeasured)
    assert read_back.blocks == {"full-c1": replace(measured, other_cpu_share=None)}


def test_a_trial_of_several_cohorts_fails_only_if_it_does_in_all(synthetic_sweep: SyntheticSweep) -> None:
    candidates = [Candidate(label="full", path="/full", draft_steps=s) for s in (2, 4)]
    plan = make_plan(SweepConfig(draft_steps=[2, 4]), 4, candidates)
    plain, s2 = plan.trials[0], plan.trials[1]
    measured = next(iter(synthetic_sweep.blocks.values()))[0].measured
    state = SweepState(plan)
    state.apply(TrialFailed(cohort="s2", trial=plain.name, cause="died"))
    state.apply(TrialFailed(cohort="s2", trial=s2.name, cause="broken"))
    assert state.errors == {plain: "died", s2: "broken"}
    state.apply(replace(ROUND, cohort="s4", blocks={plain.name: measured}))
    assert state.errors == {s2: "broken"}
    assert [b.prompt_block for b in state.blocks[plain]] == [1]
    state.apply(TrialFailed(cohort="s4", trial=plain.name, cause="died again"))
    assert state.errors == {plain: "died", s2: "broken"}
    assert Traffic(concurrency=1) in {t.traffic for t in state.errors}
