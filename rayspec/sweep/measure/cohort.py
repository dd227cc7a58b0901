"""Measures one cohort, pass by pass, into the journal. Knows neither Tune nor MLflow.

A failure affects one trial. A failure of a drafter (its load, its swap) affects its trials of the cohort. If an engine
dies, it is restarted and the whole round is measured again, since what was measured before belongs to another window of
time. A trial whose engine dies twice in a round is marked failed.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, replace
from math import exp, log
from statistics import fmean
from typing import Any

from rayspec.farm.actor import RuntimeHandle
from rayspec.farm.load import Traffic
from rayspec.farm.runtime import EngineDied, EngineFailed
from rayspec.messages import first_line
from rayspec.records import CanaryAnswer, Measured
from rayspec.statistics import Interval, beats_one
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.measure.stopping import hopeless, is_finished
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.plan.sampling import draws_drafts
from rayspec.sweep.plan.trials import Cohort, Round, Trial
from rayspec.sweep.record.events import (
    CanaryAnswered,
    CohortEnded,
    EngineStarted,
    Event,
    HeadsTimed,
    RoundMeasured,
    TrafficFinished,
    TrialDropped,
    TrialFailed,
)
from rayspec.sweep.record.journal import JournalWriter
from rayspec.sweep.record.measured import SweepState
from rayspec.sweep.record.results import speedups
from rayspec.workloads.canary import CANARY_TOKENS, canary_conversations
from sglang_ext.drafters.counting import StepShape

logger = logging.getLogger(__name__)
ATTEMPTS = 2  # a trial fails when its engine has died this many times


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Where a cohort stands after a pass. `speedup_vs_plain` is its best candidate's, as the geometric mean over the
    traffic; 0 without one."""

    passes: int
    is_done: bool
    speedup_vs_plain: float


class _TrialDied(Exception):
    """The engine of `trial` died; `trials` are those that fail if that was once too often."""

    def __init__(self, trials: list[Trial], cause: str) -> None:
        super().__init__(cause)
        self.trials = trials


class CohortRun:
    """One cohort, continued where its journal ends. `engines` may hold those of the cohort before."""

    def __init__(self, prepared: Prepared, cohort: Cohort, engines: Engines, journal: JournalWriter) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.plan = prepared.plan
        self.cohort = cohort
        self.engines = engines
        self.journal = journal
        self.state = SweepState(self.plan, journal.read(cohort.name))
        self.passes = 0
        self._starting_s = 0.0  # time of the round spent on starting engines whose turn came
        # tensor-parallel ranks share large heads, so that none runs what is timed alone
        is_timed = self.config.head_latency and self.config.engine.extra.get("tp_size", 1) == 1
        self._has_timed_heads = bool(self.state.head_latency_s) or not is_timed

    def one_pass(self) -> PassResult:
        """Measure what the journal lacks of the next pass. Once it holds the cohort's end, nothing is measured."""
        ended = self.cohort.name in self.state.ended
        for round_ in self.plan.rounds(self.cohort, self.passes):
            if round_.index in self.state.rounds or ended or self._is_finished(round_):
                continue
            self._measure(round_)
        self.passes += 1
        is_done = self.passes >= self.config.max_passes() or self._is_over()
        if is_done and not ended:
            self._ask_canary()
            self._record(CohortEnded(cohort=self.cohort.name, reason="measured"))
        return PassResult(passes=self.passes, is_done=is_done, speedup_vs_plain=self._best())

    def _is_over(self) -> bool:
        """Whether no pass after this one would measure anything."""
        is_begun = any(r.index in self.state.rounds for r in self.plan.rounds(self.cohort, self.passes))
        if is_begun or self.cohort.name in self.state.ended:
            return not is_begun
        first_of_traffic = self.plan.rounds(self.cohort, self.passes)[: len(self.plan.traffic)]
        return all(list(map(self._is_finished, first_of_traffic)))  # each decides, and says so in the journal

    def _is_finished(self, round_: Round) -> bool:
        """Whether the round's traffic has been measured long enough; decided once, before the first round of a pass."""
        key = (self.cohort.name, round_.traffic)
        if key in self.state.finished or round_.prompt_block > 0:
            return key in self.state.finished
        passes = round_.repeat
        if passes in self.config.milestones():
            found = {t: self._speedups(t) for t in round_.trials if self._is_candidate(t)}
            for trial in hopeless(self.config, passes, {t: i["plain"] for t, i in found.items() if "plain" in i}):
                self._record(TrialDropped(cohort=self.cohort.name, trial=trial.name, passes=passes))
        intervals = (i for t in round_.trials if self._is_candidate(t) for i in self._speedups(t).values())
        allowed_s = self.config.stop.max_seconds
        is_budget_spent = allowed_s is not None and self.state.spent_s >= allowed_s / self.plan.num_cohorts
        if is_finished(self.config, passes, intervals, is_budget_spent):
            self._record(TrafficFinished(cohort=self.cohort.name, traffic=round_.traffic.label, passes=passes))
            return True
        return False

    def _is_candidate(self, trial: Trial) -> bool:
        return trial.candidate is not None and self._is_measured(trial)

    def _is_measured(self, trial: Trial) -> bool:
        return trial not in self.state.errors and trial not in self.state.dropped

    def _speedups(self, trial: Trial) -> dict[str, Interval]:
        return speedups(self.config, trial, self.state.blocks, self.state.errors)

    def _best(self) -> float:
        """The best candidate's speed-up over plain decoding in the passes so far; the same when they are read again."""
        logs: dict[str, list[float]] = {}
        last = max(r.index for r in self.plan.rounds(self.cohort, self.passes - 1))
        blocks = {t: [b for b in self.state.blocks[t] if b.index <= last] for t in self.cohort.trials}
        candidates = self.cohort.candidates
        others = [c for c in candidates if not c.is_baseline(self.config.baseline)] or candidates
        for trial in self.cohort.trials:
            if trial.candidate in others and trial not in self.state.errors:
                found = speedups(self.config, trial, blocks, self.state.errors).get("plain")
                if found is not None:
                    logs.setdefault(trial.label, []).append(log(found.value))
        return max((exp(fmean(values)) for values in logs.values()), default=0.0)

    def _measure(self, round_: Round) -> None:
        """Answer a round by all its trials, or, where an engine dies, by all of them again."""
        deaths: Counter[Trial] = Counter()
        while True:
            self._make_ready()
            self._starting_s, start = 0.0, time.perf_counter()
            try:
                blocks = {t.name: self._block(t, round_) for t in self._order(round_) if self._is_measured(t)}
                break
            except _TrialDied as died:
                deaths[died.trials[0]] += 1
                is_out_of_attempts = deaths[died.trials[0]] == ATTEMPTS
                then = "" if is_out_of_attempts else "; restarting it and measuring the round again"
                logger.warning("an engine died%s: %s", then, first_line(died))
                for trial in died.trials if is_out_of_attempts else []:
                    self._fail(trial, str(died))
        self._record(
            RoundMeasured(
                cohort=self.cohort.name,
                index=round_.index,
                prompt_block=round_.prompt_block,
                seconds=time.perf_counter() - start - self._starting_s,
                blocks={name: m for name, m in blocks.items() if m is not None},
            )
        )

    def _order(self, round_: Round) -> list[Trial]:
        """Engines that take turns change once a round: the one that runs answers first."""
        if self.engines.placement.side_by_side:
            return list(round_.trials)
        is_plain_up = self.engines.plain is not None and self.engines.plain.is_alive
        return sorted(round_.trials, key=lambda trial: (trial.candidate is None) != is_plain_up)

    def _block(self, trial: Trial, round_: Round) -> Measured | None:
        """None where the trial failed."""
        if not self.engines.placement.side_by_side:
            self._take_turn(trial.candidate)
            if not self._is_measured(trial):
                return None
        prompts = self.prepared.prompts[round_.first : round_.last]
        try:
            engine = self.engines.use(trial.candidate)
        except EngineDied as error:
            raise _TrialDied(self._trials(trial.candidate), str(error)) from error
        except EngineFailed as error:
            self._fail_candidate(trial.candidate, str(error))
            return None
        try:
            one = Traffic(concurrency=1, temperature=trial.traffic.temperature)
            engine.warm_up(self.engines.load(prompts[:1], one, max_new_tokens=self.config.warmup_tokens))
            # every trial of the round meets the same arrivals
            arrivals = self.config.seed + round_.index
            return engine.measure(self.engines.load(prompts, trial.traffic, arrival_seed=arrivals))
        except EngineDied as error:
            raise _TrialDied([trial], str(error)) from error
        except EngineFailed as error:
            self._fail(trial, str(error))
            return None

    def _make_ready(self) -> None:
        """Both engines running and warm, those that still have a trial; what cannot be started, fails."""
        placement = self.engines.placement
        if not placement.side_by_side:
            return  # each is started when its turn comes
        if placement.memory_share is not None:
            self._start_plain()  # alone: the next engine takes its share of what this one leaves of their GPU
        elif self._is_wanted(None):
            self.engines.begin_plain(self.cohort)  # while the other starts
        self._start_speculative()
        self._start_plain()
        self._time_heads()

    def _ask_canary(self) -> None:
        """Ask the fastest candidate of each traffic the canary prompts. What does not answer, or does not start again
        for it, fails nothing by it: all that was to be measured is."""
        fastest = dict.fromkeys(filter(None, map(self._fastest, self.plan.traffic))) if self.config.canary else ()
        for candidate in fastest:
            trials = self._trials(candidate)
            if self.state.canary.keys() >= set(trials):
                continue
            try:
                answers = self._canary_answers(candidate)
            except EngineFailed as error:
                logger.warning("%s did not answer the canary prompts: %s", candidate.label, first_line(error))
                continue
            names = tuple(t.name for t in trials)
            self._record(CanaryAnswered(cohort=self.cohort.name, trials=names, answers=answers))

    def _canary_answers(self, candidate: Candidate) -> tuple[CanaryAnswer, ...]:
        """As who serves it asks: greedily, one after the other, in the target's chat template. Raises EngineFailed."""
        if not self.engines.placement.side_by_side:
            self.engines.stop_plain()
        if not self.engines.has_speculative(self.cohort):
            self._started(f"steps{self.cohort.draft_steps}", self.engines.start_speculative(self.cohort, candidate))
        engine, answers = self.engines.use(candidate), list[CanaryAnswer]()
        for conversation in canary_conversations():  # each by itself, since a block has its time
            load = self.engines.load((conversation,), Traffic(concurrency=1), max_new_tokens=CANARY_TOKENS)
            load = replace(load, temperature=0.0, ignore_eos=False, chat_template=True)
            (answer,) = engine.measure(load).requests
            answers.append(CanaryAnswer.of(conversation.turns[0], answer))
        return tuple(answers)

    def _fastest(self, traffic: Traffic) -> Candidate | None:
        """The cohort's candidate that may be chosen under this traffic; None where no speed-up is known."""

        def rank(interval: Interval) -> tuple[bool, float]:
            return beats_one(interval) is True, interval.value  # as the report decides

        trials = [t for t in self.cohort.trials if t.traffic == traffic and self._is_candidate(t)]
        found = {t.candidate: i["plain"] for t in trials if "plain" in (i := self._speedups(t))}
        return max(found, key=lambda candidate: rank(found[candidate]), default=None)

    def _take_turn(self, candidate: Candidate | None) -> None:
        """Have the engine of a candidate running where there is room for one, and the other one gone."""
        start = time.perf_counter()
        if candidate is None:
            self.engines.stop_speculative()
            self._start_plain()
        else:
            self.engines.stop_plain()
            self._start_speculative()
            self._time_heads()
        self._starting_s += time.perf_counter() - start

    def _start_speculative(self) -> None:
        """Start with the first candidate that works, where the running engine does not do; those that do not, fail."""
        if self.engines.has_speculative(self.cohort):
            return
        for candidate in self.cohort.candidates:
            for attempt in range(ATTEMPTS):
                if not self._is_wanted(candidate):
                    break
                try:
                    started = self.engines.start_speculative(self.cohort, candidate)
                    self._warm_up(self.engines.speculative)
                except EngineFailed as error:
                    self.engines.stop_speculative()
                    if not isinstance(error, EngineDied) or attempt + 1 == ATTEMPTS:
                        self._fail_start(candidate, error)
                else:
                    self._started(f"steps{self.cohort.draft_steps}", started)
                    return

    def _start_plain(self) -> None:
        for attempt in range(ATTEMPTS):
            if not self._is_wanted(None):
                return
            try:
                self.engines.begin_plain(self.cohort)
                started = self.engines.wait_for_plain()
                if started is not None:
                    self._warm_up(self.engines.plain)
                    self._started("plain", started)
                return
            except EngineFailed as error:
                self.engines.stop_plain()
                if not isinstance(error, EngineDied) or attempt + 1 == ATTEMPTS:
                    self._fail_start(None, error)

    def _is_wanted(self, candidate: Candidate | None) -> bool:
        return any(map(self._is_measured, self._trials(candidate)))

    def _warm_up(self, engine: RuntimeHandle | None) -> None:
        """A whole block under every traffic, so that no trial pays for what a new engine does once."""
        assert engine is not None, "called right after its start"
        for traffic in self.config.traffic():
            engine.warm_up(self.engines.load(self.prepared.prompts[: self.config.block_prompts], traffic))

    def _time_heads(self) -> None:
        """All heads of the sweep one after the other in one process, in the cohort that comes first."""
        engine = self.engines.speculative
        # how many rows an open loop gives the head is not known beforehand; drawn drafts want its distribution, another
        # question
        config = self.config
        asked = [t for t in config.traffic() if not t.is_open and not draws_drafts(config, config.temperature_of(t))]
        if self._has_timed_heads or not asked or engine is None or not engine.is_alive:
            return
        self._has_timed_heads = True
        steps = max(config.draft_steps)
        healthy: dict[StepShape, dict[str, str]] = {}
        for c in self.plan.candidates:
            if not c.problem:
                nodes = c.shape.verified(steps)
                shape = StepShape(draft_steps=steps, topk=c.shape.topk, num_draft_tokens=nodes)
                healthy.setdefault(shape, {})[c.label] = c.path
        try:
            timed = {
                streams: {
                    label: seconds
                    for shape, paths in healthy.items()
                    for label, seconds in engine.head_latencies(paths, streams, shape).items()
                }
                for streams in config.concurrency
            }
        except EngineFailed as error:
            logger.warning("head latency was not measured: %s", error)
            return
        for streams, latency_s in timed.items():
            if untimed := [label for paths in healthy.values() for label in paths if label not in latency_s]:
                said = "heads not timed at concurrency %d: %s (why: the engine's log)"
                logger.warning(said, streams, ", ".join(untimed))
        self._record(HeadsTimed(latency_s={t.label: timed[t.concurrency] for t in asked}))

    def _trials(self, candidate: Candidate | None) -> list[Trial]:
        return [t for t in self.cohort.trials if t.candidate == candidate]

    def _fail_candidate(self, candidate: Candidate | None, cause: str) -> None:
        for trial in self._trials(candidate):
            self._fail(trial, cause)

    def _fail_start(self, candidate: Candidate | None, error: EngineFailed) -> None:
        self._fail_candidate(candidate, self.engines.placement.with_way_out(str(error)))

    def _fail(self, trial: Trial, cause: str) -> None:
        if trial not in self.state.errors:
            self._record(TrialFailed(cohort=self.cohort.name, trial=trial.name, cause=cause))

    def _started(self, engine: str, started: dict[str, Any]) -> None:
        self._record(EngineStarted(cohort=self.cohort.name, engine=engine, **started))

    def _record(self, event: Event) -> None:
        self.journal.append(event)
        self.state.apply(event)
