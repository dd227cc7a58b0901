"""Follows the journal while the sweep runs: progress on the terminal, and MLflow, whenever it can be reached.

A thread, so that neither holds up the measuring. What MLflow does not take waits, in order, until it does.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

from tqdm import tqdm

from rayspec.driver.publish import Publisher
from rayspec.sweep.plan.trials import Plan, Trial
from rayspec.sweep.record.events import (
    CanaryAnswered,
    CohortEnded,
    EngineStarted,
    Event,
    RoundMeasured,
    TrialDropped,
    TrialFailed,
)
from rayspec.sweep.record.folder import SweepFolder
from rayspec.sweep.record.journal import GIVEN_UP, lines
from rayspec.sweep.record.measured import SweepState
from rayspec.tracking import RETRY_S, UNREACHABLE, is_outage, persistently

logger = logging.getLogger(__name__)
POLL_S = 0.5


class Follower(threading.Thread):
    """Reads events into `state` and has them published. Ended by `finish`, or by `stop` without more writes."""

    def __init__(self, folder: SweepFolder, plan: Plan, publisher: Publisher, progress: tqdm) -> None:
        super().__init__(name="follower", daemon=True)
        self.state = SweepState(plan)
        self.last_time_s = 0.0  # when the last event was
        self._plan = plan
        self._path = folder.journal
        self._publisher = publisher
        self._progress = Progress(plan, progress)
        self._offset = 0
        self._starts: Counter[str] = Counter()
        self._writes: deque[Callable[[], None]] = deque()
        self._retry_at = 0.0
        self._refusal: BaseException | None = None
        self._is_over = threading.Event()
        self._warned: set[str] = set()  # labels

    def run(self) -> None:
        self._read()
        self._progress.begin()
        while not self._is_over.wait(POLL_S):
            self._read()
            try:
                self._write()
            except BaseException as error:
                self._refusal = error
                return

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self.is_alive():
            self.join()

    def finish(self, patience_s: float) -> None:
        """End the thread and publish the rest. Raises what MLflow refused, and its error if it is gone for too long."""
        self.stop()
        if self._refusal is not None:
            raise self._refusal
        self._read()
        self._retry_at = 0.0
        persistently(self._drain, patience_s)

    def _read(self) -> None:
        if not self._path.is_file():
            return
        for offset, event in lines(self._path, self._offset):
            self._offset = offset
            self.state.apply(event)
            self.last_time_s = event.time
            self._writes.extend(self._what_to_write(event))
            self._progress.show(event)
            if isinstance(event, RoundMeasured):
                self._warn_of_unaccepted([self.state.trials[name] for name in event.blocks])

    def _warn_of_unaccepted(self, trials: Iterable[Trial]) -> None:
        """Once for each drafter, after its first block."""
        for trial in trials:
            requests = self.state.blocks[trial][0].requests
            steps, candidate = sum(r.verify_steps for r in requests), trial.candidate
            if candidate is None or trial.label in self._warned or not steps:
                continue
            if any(r.accepted_drafts for r in requests):
                continue
            self._warned.add(trial.label)
            logger.warning(
                "%s: none of its drafts was accepted in its first %d steps (tau 1.00); look whether %s holds the "
                "weights of a drafter that was trained for this target",
                trial.name,
                steps,
                candidate.path,
            )

    def _what_to_write(self, event: Event) -> list[Callable[[], None]]:
        p, at = self._publisher, event.time
        match event:
            case EngineStarted():
                number = self._starts[event.engine]
                self._starts[event.engine] += 1
                return [partial(p.engine_started, event.engine, event.seconds, number, at)]
            case RoundMeasured():
                trials = [self.state.trials[name] for name in event.blocks]
                return [partial(p.block, t, tuple(self.state.blocks[t]), at) for t in trials]
            case TrialFailed():
                trial = self.state.trials[event.trial]
                return [partial(p.failed, trial, event.cause)] if trial in self.state.errors else []
            case TrialDropped():
                reason = f"after {event.passes} passes: its whole interval is below the best one's"
                return [partial(p.given_up, self.state.trials[event.trial], reason)]
            case CanaryAnswered():
                return [partial(p.canary, self.state.trials[name], event.answers) for name in event.trials]
            case CohortEnded(reason=reason) if reason == GIVEN_UP:
                own = [t for c in self._plan.cohorts if c.name == event.cohort for t in c.trials]
                baseline = self._publisher.config.baseline
                dropped = [t for t in own if t.candidate is not None and not t.candidate.is_baseline(baseline)]
                return [partial(p.given_up, t, "by the scheduler, in comparison with others") for t in dropped]
        return []

    def _write(self) -> None:
        """Write as much as MLflow takes now."""
        if time.monotonic() < self._retry_at:
            return
        try:
            self._drain()
        except UNREACHABLE as error:
            if not is_outage(error):
                raise
            if not self._retry_at:
                logger.warning("MLflow does not answer; measuring goes on, and what is to be written waits: %s", error)
            self._retry_at = time.monotonic() + RETRY_S
        else:
            self._retry_at = 0.0

    def _drain(self) -> None:
        while self._writes:
            self._writes[0]()
            self._writes.popleft()


class Progress:
    """Blocks measured of those planned, which become fewer as cohorts end early."""

    def __init__(self, plan: Plan, bar: tqdm) -> None:
        self._plan = plan
        self._bar = bar
        self._done: Counter[str] = Counter()
        self._sizes = {c.name: len(c.trials) * len(plan.spans) * plan.max_passes for c in plan.cohorts}

    def begin(self) -> None:
        """What an earlier process measured counts neither towards the rate nor towards the time left."""
        self._bar.initial = self._bar.n
        self._bar.unpause()

    def show(self, event: Event) -> None:
        match event:
            case EngineStarted():
                self._bar.unpause()  # starts count neither towards the rate nor towards the time left
            case RoundMeasured(cohort=name):
                self._done[name] += len(event.blocks)
                self._bar.set_postfix_str(name, refresh=False)
                self._bar.update(len(event.blocks))
            case CohortEnded(cohort=name):
                self._bar.total -= self._sizes[name] - self._done[name]
                self._bar.refresh()
