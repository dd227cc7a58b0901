"""What the events of a journal say, as values: of one cohort, or of a whole sweep."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, Measured
from rayspec.sweep.plan.trials import Plan, Trial
from rayspec.sweep.record.journal import Event, damaged, lines


class SweepState:
    """Blocks, errors and decisions so far; `apply` is called with the events in their order."""

    def __init__(self, plan: Plan, events: Iterable[Event] = ()) -> None:
        self.trials = {t.name: t for t in plan.trials}
        self._traffic = {t.label: t for t in plan.traffic}
        self.blocks: dict[Trial, list[BlockRecord]] = defaultdict(list)
        self.head_latency_s: dict[Traffic, dict[str, float]] = {}
        self.machine: dict[str, str] = {}  # of the engine that started last
        self.rounds: set[int] = set()
        self.dropped: dict[Trial, int] = {}  # passes after which it was given up
        self.finished: dict[tuple[str, Traffic], int] = {}  # by cohort: after how many passes
        self.begun: dict[str, None] = {}  # cohorts, in their order
        self.ended: dict[str, str] = {}  # cohorts, with the reason
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
        if "cohort" in event:
            self.begun.setdefault(event["cohort"])
        match event["event"]:
            case "engine":
                self.machine = event["machine"]
            case "heads":
                self.head_latency_s = {self._traffic[k]: v for k, v in event["latency_s"].items()}
            case "round":
                self.rounds.add(event["index"])
                self.spent_s += event["seconds"]
                for name, block in block_records(event).items():
                    trial = self.trials[name]
                    self.blocks[trial].append(block)
                    self._cohorts[trial].add(event["cohort"])
            case "failed":
                self._failures[self.trials[event["trial"]]][event.get("cohort")] = event["cause"]
            case "dropped":
                self.dropped[self.trials[event["trial"]]] = event["passes"]
            case "finished":
                self.finished[event["cohort"], self._traffic[event["traffic"]]] = event["passes"]
            case "ended":
                self.ended[event["cohort"]] = event["reason"]


def read_state(plan: Plan, journal: Path) -> SweepState:
    """What the file says, nothing where there is none. Raises ValueError for a line that is no event of this plan."""
    state, start = SweepState(plan), 0
    for end, event in lines(journal, 0) if journal.is_file() else ():
        try:
            state.apply(event)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise damaged(journal, start, error) from error
        start = end
    return state


def block_records(event: Event) -> dict[str, BlockRecord]:
    """The blocks of a round by the name of their trial."""
    return {
        name: BlockRecord(
            index=event["index"], prompt_block=event["prompt_block"], measured=Measured.from_dict(measured)
        )
        for name, measured in event["blocks"].items()
    }
