"""Whether the passes over the workload go on. Pure: the controller gives the intervals and the time, and acts."""

from collections.abc import Iterable
from dataclasses import dataclass

from rayspec.statistics import Interval
from rayspec.sweep.config import SweepConfig


@dataclass(frozen=True)
class Budget:
    """Seconds of measuring that the sweep has spent, and may have spent at the end of the phase that runs."""

    spent_s: float
    allowed_s: float | None

    @property
    def is_spent(self) -> bool:
        return self.allowed_s is not None and self.spent_s >= self.allowed_s


def phase_budget_s(config: SweepConfig, spent_s: float, phases_left: int) -> float | None:
    """What may have been spent at the end of a phase: its even share of what is left, so that no later one starves."""
    total = config.stop.max_seconds
    return None if total is None else spent_s + max(0.0, total - spent_s) / phases_left


def is_finished(config: SweepConfig, passes: int, intervals: Iterable[Interval], budget: Budget) -> bool:
    """Whether a group of trials that share rounds needs no other pass after `passes` of them.

    `intervals` are those of all its speed-ups. They are looked at after the numbers of passes of `config.looks()` only:
    the level of the intervals allows for so many looks and no more.
    """
    if passes < config.repeats:
        return False
    if passes >= config.looks()[-1] or budget.is_spent:
        return True
    assert config.stop.ci_width is not None, "else there are no looks after the first repeats"
    return passes in config.looks() and all(i.relative_width <= config.stop.ci_width for i in intervals)
