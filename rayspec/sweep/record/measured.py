"""What the events of a journal say, as values: of one cohort, or of a whole sweep."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, CanaryAnswer
from rayspec.sweep.plan.trials import Plan, Trial
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
from rayspec.sweep.record.journal import damaged, lines


class SweepState:
    """Blocks, errors and decisions so far; `apply` is called with the events in their order."""

    def __init__(self, plan: Plan, events: Iterable[Event] = ()) -> None:
        self.trials = {t.name: t for t in plan.trials}
        self._traffic = {t.label: t for t in plan.traffic}
        self.blocks: dict[Trial, list[BlockRecord]] = defaultdict(list)
        self.head_latency_s: dict[Traffic, dict[str, float]] = {}
        self.machine: dict[str, Any] = {}  # the one of the engine that started last
        self.rounds: set[int] = set()
        self.dropped: dict[Trial, int] = {}  # passes after which it was given up
        self.finished: dict[tuple[str, Traffic], int] = {}  # by cohort: after how many passes
        self.begun: dict[str, None] = {}  # cohorts, in their order
        self.ended: dict[str, str] = {}  # cohorts, with the reason
        self.canary: dict[Trial, tuple[CanaryAnswer, ...]] = {}
        self.spent_s = 0.0  # on measuring, engine starts left out
        self._failures: dict[Trial, dict[str | None, str]] = defaultdict(dict)
        self._cohorts: dict[Trial, set[str]] = defaultdict(set)  # in which it was measured
        for event in events:
            self.apply(event)

    @property
    def errors(self) -> dict[Trial, str]:
        """Why trials failed. One that several cohorts measure (plain decoding, the baseline) fails if it did in all."""
        return {
            trial: next(iter(causes.values()))
            for trial, causes in self._failures.items()
            if not self._cohorts[trial] - causes.keys()
        }

    def apply(self, event: Event) -> None:
        if event.cohort is not None:
            self.begun.setdefault(event.cohort)
        match event:
            case EngineStarted():
                self.machine = event.machine
            case HeadsTimed():
                self.head_latency_s = {self._traffic[k]: v for k, v in event.latency_s.items()}
            case RoundMeasured():
                self.rounds.add(event.index)
                self.spent_s += event.seconds
                for name, block in event.block_records().items():
                    trial = self.trials[name]
                    self.blocks[trial].append(block)
                    self._cohorts[trial].add(event.cohort)
            case TrialFailed():
                self._failures[self.trials[event.trial]][event.cohort] = event.cause
            case TrialDropped():
                self.dropped[self.trials[event.trial]] = event.passes
            case TrafficFinished():
                self.finished[event.cohort, self._traffic[event.traffic]] = event.passes
            case CanaryAnswered():
                self.canary |= {self.trials[name]: event.answers for name in event.trials}
            case CohortEnded():
                self.ended[event.cohort] = event.reason


def read_state(plan: Plan, journal: Path) -> SweepState:
    """What the file says, nothing where there is none. Raises ValueError for a line that is no event of this plan."""
    state, start = SweepState(plan), 0
    for end, event in lines(journal, 0) if journal.is_file() else ():
        try:
            state.apply(event)
        except LookupError as error:
            raise damaged(journal, start, f"the plan has no {error}") from error
        start = end
    return state
