"""Whether the passes over the workload go on. Pure: a cohort gives the intervals and the time, and acts."""

from collections.abc import Iterable, Mapping

from rayspec.statistics import Interval
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial


def is_finished(config: SweepConfig, passes: int, intervals: Iterable[Interval], is_budget_spent: bool) -> bool:
    """Whether a group of trials that share rounds needs no other pass after `passes` of them.

    `intervals` are those of all its speed-ups. They are looked at after the numbers of passes of `config.looks()` only:
    the level of the intervals allows for so many looks and no more.
    """
    if passes < config.repeats:
        return False
    if passes >= config.max_passes() or is_budget_spent:
        return True
    assert config.stop.ci_width is not None, "else there are no looks after the first repeats"
    return passes in config.looks() and all(i.relative_width <= config.stop.ci_width for i in intervals)


def hopeless(config: SweepConfig, passes: int, vs_plain: Mapping[Trial, Interval]) -> list[Trial]:
    """Candidates of a cohort to give up after `passes`: those whose whole interval is below that of the best one.

    `vs_plain` holds speed-ups under one traffic. Looked at after `config.milestones()` only, and never the baseline.
    """
    if passes not in config.milestones():
        return []
    best_low = max((i.low for i in vs_plain.values() if i.low is not None), default=float("-inf"))
    below = [t for t, i in vs_plain.items() if i.high is not None and i.high < best_low]
    return [t for t in below if t.candidate is not None and not t.candidate.is_baseline(config.baseline)]
