"""Runs a sweep: the only part that knows plan, engines, scores, tracking and report.

A trial that fails, fails alone: its run ends FAILED with the cause, the others go on. What fails a drafter (its load,
its swap) fails its trials of the phase; a dead speculative engine is replaced, which costs the trial that killed it.
"""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from rayspec.costs import read_costs
from rayspec.farm.actor import RuntimeHandle, cluster
from rayspec.farm.load import Traffic
from rayspec.farm.runtime import EngineFailed
from rayspec.home import artifact_uri, tracking_uri
from rayspec.provenance import provenance
from rayspec.records import BlockRecord
from rayspec.report.table import summary
from rayspec.statistics import Interval
from rayspec.sweep.engines import Engines
from rayspec.sweep.plan import Drafter, Phase, Round, Trial
from rayspec.sweep.prepare import Prepared
from rayspec.sweep.publish import Publisher
from rayspec.sweep.results import TrialResult, score, speedups
from rayspec.sweep.stopping import Budget, is_finished, phase_budget_s
from rayspec.tracking import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    results: Sequence[TrialResult]
    summary: str
    parent_run_id: str
    tracking_uri: str

    @property
    def failed(self) -> list[TrialResult]:
        return [r for r in self.results if r.error]


def run_sweep(prepared: Prepared, home: Path, command: str) -> SweepOutcome:
    """Measure every trial and record it; engine logs go under `home`.

    Raises what stops the whole sweep (EngineFailed where no trial succeeded), after its runs were ended as FAILED.
    """
    config = prepared.config
    tracker = Tracker(tracking_uri(), config.experiment, artifact_uri())
    tags = {"command": command, **provenance()}
    with tracker.parent(config.name, {**tags, "kind": "sweep"}) as parent:
        publisher = Publisher(tracker, parent, config, tags)
        publisher.open(prepared.plan, prepared.describe(), prepared.prompts)
        engines = Engines(config, prepared.target, home / "logs" / parent.run_id)
        measurement = _Measurement(prepared, engines, publisher)
        with cluster(config.ray.address), engines.running():
            try:
                measurement.run()
            finally:
                publisher.logs(engines.log_folder)
        costs = read_costs(prepared.target, {d.label: d.path for d in measurement.measured_drafters()})
        results = score(config, measurement.blocks, measurement.errors, measurement.head_latency_s, costs)
        text = summary(results)
        publisher.close(results, measurement.blocks, text, engines.machine)
        if all(r.error for r in results):
            raise EngineFailed(f"no trial succeeded:\n{text}")
        return SweepOutcome(results=results, summary=text, parent_run_id=parent.run_id, tracking_uri=tracker.uri)


class _Measurement:
    """The blocks and errors of a sweep as they come in."""

    def __init__(self, prepared: Prepared, engines: Engines, publisher: Publisher) -> None:
        self.prepared = prepared
        self.config = prepared.config
        self.engines = engines
        self.publisher = publisher
        self.blocks: dict[Trial, list[BlockRecord]] = defaultdict(list)
        self.errors: dict[Trial, str] = {}
        self.head_latency_s: dict[Traffic, dict[str, float]] = {}
        self.spent_s = 0.0  # on measuring, engine starts left out

    def measured_drafters(self) -> list[Drafter]:
        """Those with a trial that succeeded."""
        return list({t.drafter.label: t.drafter for t in self.blocks if t.drafter and t not in self.errors}.values())

    def run(self) -> None:
        for drafter in self.prepared.drafters:
            if drafter.problem:
                self._fail_drafter(drafter, drafter.problem)
        plan = self.prepared.plan
        is_terminal = sys.stderr.isatty()
        with tqdm(total=plan.num_blocks, unit="block", mininterval=0.2 if is_terminal else 10) as progress:
            for number, phase in enumerate(plan.phases):
                allowed_s = phase_budget_s(self.config, self.spent_s, len(plan.phases) - number)
                self._phase(phase, allowed_s, progress)

    def _phase(self, phase: Phase, allowed_s: float | None, progress: tqdm) -> None:
        progress.write(f"starting the engine with {phase.draft_steps} draft steps ...", file=sys.stderr)
        self._start_speculative(phase.draft_steps)
        if phase is self.prepared.plan.phases[0]:
            self._finish_plain()
            self._time_heads()
        progress.unpause()  # starts count neither towards the rate nor towards the time left
        finished: set[Traffic] = set()
        begun: set[tuple[Traffic, int]] = set()
        for round_ in phase.rounds:
            if (round_.traffic, round_.repeat) not in begun:
                begun.add((round_.traffic, round_.repeat))
                budget = Budget(self.spent_s, allowed_s)
                if is_finished(self.config, round_.repeat, self._speedups(round_.trials), budget):
                    finished.add(round_.traffic)
            if round_.traffic in finished:
                progress.total -= len(round_.trials)
                continue
            for trial in round_.trials:
                progress.set_postfix_str(trial.name, refresh=False)
                if trial not in self.errors:
                    start = time.perf_counter()
                    self._block(trial, round_, phase.draft_steps)
                    self.spent_s += time.perf_counter() - start
                progress.update()
        self.engines.stop_speculative()

    def _speedups(self, trials: Sequence[Trial]) -> Iterator[Interval]:
        """Those of the trials of a round so far; lazy, since most rounds need none."""
        for trial in trials:
            if trial.drafter is not None and trial not in self.errors:
                yield from speedups(self.config, trial, self.blocks, self.errors).values()

    def _block(self, trial: Trial, round_: Round, draft_steps: int) -> None:
        prompts = self.prepared.prompts[round_.first : round_.last]
        try:
            engine = self.engines.use(trial.drafter)
        except EngineFailed as error:
            self._fail_drafter(trial.drafter, str(error), trial.draft_steps)
            self._replace_dead(draft_steps)
            return
        try:
            one = Traffic(concurrency=1)
            engine.warm_up(self.engines.load(prompts[:1], one, max_new_tokens=self.config.warmup_tokens))
            # every trial of the round meets the same arrivals
            arrivals = self.config.seed + round_.index
            measured = engine.measure(self.engines.load(prompts, trial.traffic, arrival_seed=arrivals))
        except EngineFailed as error:
            self._fail(trial, str(error))
            self._replace_dead(draft_steps)
            return
        record = BlockRecord(index=round_.index, prompt_block=round_.prompt_block, measured=measured)
        self.blocks[trial].append(record)
        self.publisher.block(trial, self.blocks[trial])

    def _start_speculative(self, draft_steps: int) -> None:
        """Start with the first drafter that works; those that do not, fail."""
        for drafter in self.prepared.drafters:
            if all(t in self.errors for t in self._trials(drafter, draft_steps)):
                continue
            try:
                seconds = self.engines.start_speculative(drafter, draft_steps)
                self._warm_up(self.engines.speculative)
            except EngineFailed as error:
                self._fail_drafter(drafter, str(error), draft_steps)
                continue
            self.publisher.engine_started(f"steps{draft_steps}", seconds)
            return

    def _replace_dead(self, draft_steps: int) -> None:
        plain, speculative = self.engines.plain, self.engines.speculative
        if plain is not None and not plain.is_alive:
            self._fail_drafter(None, "the plain engine died earlier in this sweep")
        if speculative is not None and not speculative.is_alive:
            self._start_speculative(draft_steps)

    def _finish_plain(self) -> None:
        try:
            self.publisher.engine_started("plain", self.engines.wait_for_plain())
            self._warm_up(self.engines.plain)
        except EngineFailed as error:
            self._fail_drafter(None, str(error))

    def _warm_up(self, engine: RuntimeHandle | None) -> None:
        """A whole block under every traffic, so that no trial pays for what a new engine does once."""
        assert engine is not None, "called right after its start"
        for traffic in self.config.traffic():
            engine.warm_up(self.engines.load(self.prepared.prompts[: self.config.block_prompts], traffic))

    def _time_heads(self) -> None:
        engine = self.engines.speculative
        if not self.config.head_latency or engine is None:
            return
        healthy = {d.label: d.path for d in self.prepared.drafters if not d.problem}
        try:
            for c in self.config.concurrency:  # how many rows an open loop gives the head is not known beforehand
                self.head_latency_s[Traffic(concurrency=c)] = engine.head_latencies(
                    healthy, c * self.config.topk, max(self.config.draft_steps)
                )
        except EngineFailed as error:
            logger.warning("head latency was not measured: %s", error)
            self._replace_dead(self.config.draft_steps[0])

    def _trials(self, drafter: Drafter | None, draft_steps: int | None = None) -> list[Trial]:
        return [
            t
            for t in self.prepared.plan.trials
            if t.drafter == drafter and (draft_steps in (None, 0) or t.draft_steps == draft_steps)
        ]

    def _fail_drafter(self, drafter: Drafter | None, cause: str, draft_steps: int | None = None) -> None:
        for trial in self._trials(drafter, draft_steps):
            self._fail(trial, cause)

    def _fail(self, trial: Trial, cause: str) -> None:
        if trial not in self.errors:
            self.errors[trial] = cause
            self.publisher.failed(trial, cause)
