"""The rules of a cohort, on engines that answer at once and die when they are told to."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_sweep import FakeEngine, FakeEngines, fake_sweep

from rayspec.farm.load import Load
from rayspec.farm.runtime import EngineDied, EngineFailed
from rayspec.records import Measured
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.measure.cohort import CohortRun, PassResult
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.trials import make_plan
from rayspec.sweep.record.events import (
    CanaryAnswered,
    HeadsTimed,
    RoundMeasured,
    TrafficFinished,
    TrialDropped,
    TrialFailed,
)
from rayspec.sweep.record.journal import Journal, read
from rayspec.sweep.record.measured import SweepState, read_state
from rayspec.sweep.shape import DraftShape
from rayspec.workloads.canary import CANARY_PROMPTS, CANARY_TOKENS
from sglang_ext.drafters.counting import StepShape

CANDIDATES = 3


class FaultyEngines(FakeEngines):
    """`fault` is asked before every measurement, with the head and how often it was asked, for an error to raise."""

    def __init__(self, fault: Callable[[str, int], Exception | None]) -> None:
        super().__init__(CANDIDATES)
        self.fault = fault
        self.asked: Counter[str] = Counter()

    def use(self, candidate: Candidate | None) -> Any:
        head, engine = candidate.label if candidate else "plain", super().use(candidate)
        outer = self

        class Checked(FakeEngine):
            def measure(self, load: Load) -> Measured:
                outer.asked[head] += 1
                error = outer.fault(head, outer.asked[head])
                if error is not None:
                    raise error
                return super().measure(load)

        return Checked(engine.gain, engine.draft_steps)


class LoggedEngines(FakeEngines):
    """Neither runs at first; what is started and stopped is in `log`."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(CANDIDATES)
        self.placement, self.plain, self.log = placement, None, list[str]()

    def begin_plain(self, cohort: Any) -> None:
        if self.plain is None:
            self.log.append("plain begins")
            self.plain = FakeEngine(1.0, 0)
            self.is_awaited = True

    def wait_for_plain(self) -> dict[str, Any] | None:
        if not self.is_awaited:
            return None
        self.log.append("plain is up")
        self.is_awaited = False
        return {"seconds": 1.0, "machine": {}}

    def start_speculative(self, cohort: Any, candidate: Candidate) -> dict[str, Any]:
        self.log.append("speculative starts")
        time.sleep(0.05)
        return super().start_speculative(cohort, candidate)

    def stop_plain(self) -> None:
        if self.plain is not None:
            self.log.append("plain stops")
        self.plain = None

    def stop_speculative(self) -> None:
        if self.speculative is not None:
            self.log.append("speculative stops")
        self.speculative = None

    def use(self, candidate: Candidate | None) -> Any:
        assert self.placement.side_by_side or self.plain is None or self.speculative is None, "there is room for one"
        return super().use(candidate)


def measure(path: Path, overrides: list[str], engines: FakeEngines, passes: int = 99) -> list[PassResult]:
    prepared = fake_sweep(CANDIDATES, ["draft_steps=[2]", *overrides])
    run = CohortRun(prepared, prepared.plan.cohorts[0], engines, Journal(path))  # type: ignore[arg-type]
    done: list[PassResult] = []
    while len(done) < passes and not (done and done[-1].is_done):
        done.append(run.one_pass())
    return done


def state(path: Path, overrides: list[str]) -> SweepState:
    return read_state(fake_sweep(CANDIDATES, ["draft_steps=[2]", *overrides]).plan, path)


def blocks(path: Path) -> Counter[str]:
    return Counter(name for e in read(path) if isinstance(e, RoundMeasured) for name in e.blocks)


def failures(path: Path) -> dict[str, str]:
    return {e.trial: e.cause for e in read(path) if isinstance(e, TrialFailed)}


class TimedEngines(FakeEngines):
    def __init__(self, untimed: set[str] | None = None) -> None:
        super().__init__(CANDIDATES)
        self.untimed = untimed or set()
        self.shapes = set[Any]()

    def start_speculative(self, cohort: Any, candidate: Candidate) -> dict[str, Any]:
        untimed, shapes = self.untimed, self.shapes

        class Timing(FakeEngine):
            def head_latencies(self, paths: dict[str, str], requests: int, shape: Any) -> dict[str, float]:
                shapes.add(shape)
                return dict.fromkeys(paths.keys() - untimed, 0.001)

        started = super().start_speculative(cohort, candidate)
        self.speculative = Timing(1.0, cohort.draft_steps)
        return started


@pytest.mark.parametrize(("tp_size", "timed"), [(1, 1), (2, 0)])
def test_heads_that_ranks_share_are_not_timed_whole(tp_size: int, timed: int, tmp_path: Path) -> None:
    measure(tmp_path / "j", ["head_latency=true", f"engine.extra.tp_size={tp_size}"], TimedEngines())
    assert sum(isinstance(e, HeadsTimed) for e in read(tmp_path / "j")) == timed


@pytest.mark.parametrize("shape", [DraftShape(), DraftShape(topk=8, num_draft_tokens=16)], ids=lambda s: s.label)
def test_heads_are_timed_in_the_shape_that_is_measured(shape: DraftShape, tmp_path: Path) -> None:
    prepared = fake_sweep(CANDIDATES, ["draft_steps=[2]", "head_latency=true"])
    shaped = [dataclasses.replace(c, shape=shape) for c in prepared.plan.candidates]
    plan, engines = make_plan(prepared.config, len(prepared.prompts), shaped), TimedEngines()
    prepared = dataclasses.replace(prepared, plan=plan)
    CohortRun(prepared, plan.cohorts[0], engines, Journal(tmp_path / "j")).one_pass()  # type: ignore[arg-type]
    assert engines.shapes == {StepShape(draft_steps=2, topk=shape.topk, num_draft_tokens=shape.verified(2))}


def test_who_sweeps_is_told_which_heads_were_not_timed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure(tmp_path / "j", ["head_latency=true"], TimedEngines(untimed={"d2"}))
    [found] = [e.latency_s for e in read(tmp_path / "j") if isinstance(e, HeadsTimed)]
    assert all("d1" in latency_s and "d2" not in latency_s for latency_s in found.values())
    assert "heads not timed at concurrency 1: d2" in caplog.text


def test_the_death_of_an_engine_costs_a_round_and_no_trial(tmp_path: Path) -> None:
    engines = FaultyEngines(lambda head, n: EngineDied("killed") if (head, n) == ("d2", 2) else None)
    assert measure(tmp_path / "j", [], engines)[-1].is_done
    assert failures(tmp_path / "j") == {}
    assert blocks(tmp_path / "j") == dict.fromkeys(["plain-c1", *(f"{h}-s2-c1" for h in ("full", "d1", "d2", "d3"))], 4)
    # in the second round, which d1 begins: d1 twice, d2 twice (killed, then measured), the others once
    assert engines.asked == {"plain": 4, "full": 5, "d1": 5, "d2": 5, "d3": 4}


def test_whose_engine_dies_twice_in_a_round_fails_alone(tmp_path: Path) -> None:
    engines = FaultyEngines(lambda head, n: EngineDied("out of memory") if head == "d2" else None)
    measure(tmp_path / "j", [], engines)
    assert failures(tmp_path / "j") == {"d2-s2-c1": "out of memory"}
    assert engines.asked["d2"] == 2
    assert blocks(tmp_path / "j") == dict.fromkeys(["plain-c1", *(f"{h}-s2-c1" for h in ("full", "d1", "d3"))], 4)


def test_a_refusal_fails_at_once(tmp_path: Path) -> None:
    engines = FaultyEngines(lambda head, n: EngineFailed("refused") if (head, n) == ("plain", 3) else None)
    measure(tmp_path / "j", [], engines)
    assert failures(tmp_path / "j") == {"plain-c1": "refused"}
    assert blocks(tmp_path / "j") == {
        "plain-c1": 2,
        **dict.fromkeys((f"{h}-s2-c1" for h in ("full", "d1", "d2", "d3")), 4),
    }


def test_engines_that_share_a_gpu_start_one_after_the_other(tmp_path: Path) -> None:
    engines = LoggedEngines(Placement(num_cpus=1, num_gpus=0.5, memory_share=0.4))
    measure(tmp_path / "j", [], engines)
    assert engines.log == ["plain begins", "plain is up", "speculative starts"]


class FullGpu(LoggedEngines):
    """The second engine finds too little memory, of which its process dies."""

    def start_speculative(self, cohort: Any, candidate: Candidate) -> dict[str, Any]:
        raise EngineDied("engine with d did not start: torch.OutOfMemoryError: CUDA out of memory.\n--- end of log ---")


SIDE_BY_SIDE = Placement(num_cpus=1, num_gpus=0.5, memory_share=0.4)
GPU_EACH = Placement(num_cpus=1, num_gpus=1)


@pytest.mark.parametrize(("placement", "is_said"), [(SIDE_BY_SIDE, True), (GPU_EACH, False)])
def test_who_finds_no_memory_beside_another_engine_is_told_the_way_out(
    placement: Placement, is_said: bool, tmp_path: Path
) -> None:
    """In the first line of the cause, which is what tables show. The plain engine's trial goes on."""
    measure(tmp_path / "j", [], FullGpu(placement))
    causes = failures(tmp_path / "j")
    assert causes.keys() == {f"{head}-s2-c1" for head in ("full", "d1", "d2", "d3")}
    for cause in causes.values():
        first, *rest = cause.splitlines()
        assert "CUDA out of memory" in first
        assert first.endswith("in a new sweep with ray.side_by_side=false they take turns") == is_said
        assert rest == ["--- end of log ---"]
    assert blocks(tmp_path / "j") == {"plain-c1": 4}


def test_others_start_together(tmp_path: Path) -> None:
    engines = LoggedEngines(Placement(num_cpus=1, num_gpus=1))
    measure(tmp_path / "j", [], engines)
    assert engines.log == ["plain begins", "speculative starts", "plain is up"]


def test_where_there_is_room_for_one_engine_they_take_turns(tmp_path: Path) -> None:
    """A change a round, each of the four rounds by all trials; the time of starts is no time of measuring."""
    engines = LoggedEngines(Placement(num_cpus=1, num_gpus=2, side_by_side=False))
    assert measure(tmp_path / "j", [], engines)[-1].is_done
    to_plain, to_speculative = (
        ["speculative stops", "plain begins", "plain is up"],
        ["plain stops", "speculative starts"],
    )
    assert engines.log == ["speculative starts", *to_plain, *to_speculative, *to_plain, *to_speculative]
    assert blocks(tmp_path / "j") == dict.fromkeys(["plain-c1", *(f"{h}-s2-c1" for h in ("full", "d1", "d2", "d3"))], 4)
    rounds = [e for e in read(tmp_path / "j") if isinstance(e, RoundMeasured)]
    assert len(rounds) == 4
    assert all(e.seconds < 0.05 for e in rounds)


def test_another_process_goes_on_with_the_next_round(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = measure(whole, ["repeats=3"], FakeEngines(CANDIDATES))
    measure(cut, ["repeats=3"], FakeEngines(CANDIDATES), passes=2)
    lines = cut.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:-2]))  # the second pass misses two rounds
    again = FaultyEngines(lambda head, n: None)
    assert measure(cut, ["repeats=3"], again) == expected
    assert again.asked["plain"] == 2 + 4
    rounds = [[e.block_records() for e in read(p) if isinstance(e, RoundMeasured)] for p in (whole, cut)]
    assert rounds[0] == rounds[1]
    nothing = FaultyEngines(lambda head, n: RuntimeError("nothing is left to measure"))
    assert measure(cut, ["repeats=3"], nothing) == expected


def test_who_is_clearly_slower_than_the_best_is_given_up(tmp_path: Path) -> None:
    """Gains of 1, 4/3, 5/3 and 2 with a spread of 2%."""
    measure(tmp_path / "j", ["repeats=3", "search.early_stop.grace_passes=1"], FakeEngines(CANDIDATES))
    dropped = {e.trial: e.passes for e in read(tmp_path / "j") if isinstance(e, TrialDropped)}
    assert dropped == {"d1-s2-c1": 1, "d2-s2-c1": 1}
    assert blocks(tmp_path / "j") == {"plain-c1": 12, "full-s2-c1": 12, "d1-s2-c1": 4, "d2-s2-c1": 4, "d3-s2-c1": 12}


def test_passes_end_when_the_intervals_are_narrow(tmp_path: Path) -> None:
    overrides = ["stop.ci_width=0.5", "stop.max_repeats=9"]
    done = measure(tmp_path / "j", overrides, FakeEngines(CANDIDATES))
    (finished,) = [e for e in read(tmp_path / "j") if isinstance(e, TrafficFinished)]
    assert done[-1].passes == finished.passes < 9
    # 25 tokens in 8 cycles of half the time, against 32 in 31, after 10 ms each
    assert done[-1].speedup_vs_plain == pytest.approx((25 / 50) / (32 / 320), rel=0.1)


def asked(path: Path) -> list[CanaryAnswered]:
    return [e for e in read(path) if isinstance(e, CanaryAnswered)]


def test_the_fastest_answers_the_canary_prompts_once(tmp_path: Path) -> None:
    journal, overrides = tmp_path / "j", ["canary=true", "concurrency=[1,2]"]
    measure(journal, overrides, FakeEngines(CANDIDATES))
    (event,) = asked(journal)
    assert event.trials == ("d3-s2-c1", "d3-s2-c2")
    assert [(a.prompt, a.verify_steps, a.accepted_drafts) for a in event.answers] == [
        (p, 8, 16) for p in CANARY_PROMPTS
    ]
    assert state(journal, overrides).canary.keys() == {t for t in state(journal, overrides).blocks if t.label == "d3"}
    before_its_end = journal.read_bytes().splitlines(keepends=True)[:-1]
    for cut in (0, 1):  # a cohort that was killed before it had said that it ended, or before it had asked
        journal.write_bytes(b"".join(before_its_end[: len(before_its_end) - cut]))
        engines = FaultyEngines(lambda head, n: None)
        assert measure(journal, overrides, engines)[-1].is_done
        assert engines.asked == ({"d3": len(CANARY_PROMPTS)} if cut else {})
        assert asked(journal) == [event] or cut


class Unwilling(FaultyEngines):
    """The engine of d3 dies of the canary prompts, and none starts again."""

    def __init__(self) -> None:
        super().__init__(lambda head, n: self.dead() if (head, n) == ("d3", 5) else None)
        self.is_dead = False

    def dead(self) -> Exception:
        self.is_dead = True
        return EngineDied("killed")

    def has_speculative(self, cohort: Any) -> bool:
        return not self.is_dead and super().has_speculative(cohort)

    def start_speculative(self, cohort: Any, candidate: Candidate) -> dict[str, Any]:
        if self.is_dead:
            raise EngineFailed("CUDA out of memory")
        return super().start_speculative(cohort, candidate)


def test_who_does_not_answer_the_canary_prompts_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = FaultyEngines(lambda head, n: EngineFailed("it is too long") if (head, n) == ("d3", 5) else None)
    for number, engines in enumerate((refusing, Unwilling())):
        journal = tmp_path / str(number)
        assert measure(journal, ["canary=true"], engines)[-1].is_done
        assert asked(journal) == []
        assert failures(journal) == {}
    assert "d3 did not answer the canary prompts: it is too long" in caplog.text
    assert "d3 did not answer the canary prompts: killed" in caplog.text


def test_a_sweep_that_only_lacks_the_canary_fails_nothing_where_no_engine_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a killed one is resumed while others have the memory."""
    journal = tmp_path / "j"
    measure(journal, ["canary=false"], FakeEngines(CANDIDATES))
    *before_its_end, _ = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(before_its_end))
    engines = Unwilling()
    engines.is_dead = True
    assert measure(journal, ["canary=true"], engines)[-1].is_done
    assert failures(journal) == {}
    assert "d3 did not answer the canary prompts: CUDA out of memory" in caplog.text


def test_it_is_asked_as_a_served_version_is(tmp_path: Path) -> None:
    """Whatever the sweep asks for."""
    seen: list[Load] = []

    class Listening(FakeEngines):
        def use(self, candidate: Candidate | None) -> Any:
            engine = super().use(candidate)

            class Heard(FakeEngine):
                def measure(self, load: Load) -> Measured:
                    seen.append(load)
                    return super().measure(load)

            return Heard(engine.gain, engine.draft_steps)

        def load(self, prompts: Any, traffic: Any, **options: Any) -> Load:
            own = {"temperature": 0.7, "ignore_eos": True, "chat_template": False}
            own["max_new_tokens"] = options.get("max_new_tokens") or 2
            return dataclasses.replace(super().load(prompts, traffic, **options), **own)

    measure(tmp_path / "j", ["canary=true"], Listening(CANDIDATES))
    own = [load for load in seen if load.prompts[0].category == "canary"]
    assert [load.prompts[0].turns for load in own] == [(prompt,) for prompt in CANARY_PROMPTS]
    found = {(x.temperature, x.ignore_eos, x.chat_template, x.max_new_tokens, x.traffic.concurrency) for x in own}
    assert found == {(0.0, False, True, CANARY_TOKENS, 1)}


def test_where_there_is_room_for_one_engine_the_fastest_takes_its_turn(tmp_path: Path) -> None:
    engines = LoggedEngines(Placement(num_cpus=1, num_gpus=2, side_by_side=False))
    measure(tmp_path / "j", ["canary=true"], engines)
    assert len(asked(tmp_path / "j")) == 1


def test_where_no_speed_up_is_known_nobody_is_asked(tmp_path: Path) -> None:
    engines = FaultyEngines(lambda head, n: EngineFailed("refused") if head == "plain" else None)
    measure(tmp_path / "j", ["canary=true"], engines)
    assert asked(tmp_path / "j") == []


def test_an_engine_that_did_not_start_is_none_to_swap_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared = fake_sweep(CANDIDATES, ["draft_steps=[2]"])
    cohort = prepared.plan.cohorts[0]
    outcomes = iter([{"start_s": 1.0, "machine": {}}, EngineFailed("CUDA out of memory")])
    stopped: list[str] = []

    class Handle:
        is_alive = True

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def begin_start(self) -> None: ...

        def finish_start(self, ref: Any, timeout_s: float) -> dict[str, Any]:
            found = next(outcomes)
            if isinstance(found, Exception):
                raise found
            return found

        def stop(self) -> None:
            stopped.append("stopped")

    monkeypatch.setattr("rayspec.sweep.measure.engines.RuntimeHandle", Handle)
    engines = Engines(prepared.config, Placement(num_cpus=0, num_gpus=0), prepared.target, tmp_path)
    engines.start_speculative(cohort, cohort.candidates[0])
    assert engines.has_speculative(cohort)
    with pytest.raises(EngineFailed, match="out of memory"):
        engines.start_speculative(cohort, cohort.candidates[1])
    assert not engines.has_speculative(cohort)
    assert len(stopped) == 2
