"""When the gate may say something, and what: a group-sequential test of each figure, on logarithms.

A figure's loss is -log(candidate / baseline). At a look the gate asks for a lower bound of the loss and an upper one:

    pass         the upper bound is below the margin: a loss of the margin is ruled out
    regression   the lower bound is above 0: there is a loss, and it may be the margin or more
    else         measure on

Asked in this order, so that a loss that is real and small passes. Looking again and again is paid for by spending
(Lan and DeMets 1983, "Discrete sequential boundaries for clinical trials", Biometrika 70): at the share t of the gate's
time, at most `rayspec.statistics.error_spent(t)` of each error has been spent, most of it late. A look gets what has
become free since the one before, and the errors of the looks are simply added, so that the sum holds whatever the
dependence of the looks. It costs a few percent more measurements than boundaries that are integrated jointly, and needs
no normal increments, no known variance and no number of looks.

Speed: the observation is a round, baseline and candidate in the order A B B A or B A A B by the throw of a coin, and
the bounds are those of Wilcoxon's signed ranks. For a candidate that is the baseline the throw alone decides on which
side of 0 a round falls, so that false alarms keep their limit exactly, under any noise, drift or burst of other load.
That is a property of the throws: they must be new ones in every gate. A fixed series leans to one side, and what
the first and the last place of a round cost would then be the candidate's in every build.

tau: pooled over the answers; the observation is a cluster, a prompt with all answers to it, or the block of prompts
where a side knows no less. Student's t around the linearised logarithm of the ratio (as
`rayspec.statistics.ratio_interval`). Where greedy answers are the same each time, the clusters which were measured are
a sample without replacement of those of the workload (Cochran 1977, "Sampling techniques", sections 2.6 and 6.4): after
a whole pass the tau of both on this workload is known, without an interval. Kernels whose sums depend on the batch may
answer otherwise the next time, so that this holds for answers that were seen to come again as they were
(`SAME_REPEATS`); others are taken as drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, log

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rayspec.gate.signed_rank import signed_rank_bounds
from rayspec.statistics import error_spent

FALSE_ALARM = 0.01  # chance that a gate whose two sides are the same says regression, over all its figures
MISSED = 0.05  # chance that the gate passes a figure that lost its margin
FIRST_LOOK = 12  # rounds
MIN_PROMPTS = 24  # of a workload
# A loss may be that of a few prompts, which a sample without any of them would not show: 1 of 20 is missed by 64 in 4%
PROMPTS_FOR_TAU = 64  # or half of the workload
# Greedy answers of both sides that came again, all of them as before. Were one in five to vary, each for itself,
# 0.8 ** 24 = 0.5% of gates would see it so, no more than may alarm falsely about tau; where it is the prompt that
# varies, on both sides, 0.8 ** 12 = 7%, few of which alarm (docs/results/gate.md)
SAME_REPEATS = 24


class Verdict(StrEnum):
    PASS = "pass"
    REGRESSION = "regression"
    UNDECIDED = "undecided"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a loss -log(candidate / baseline). An infinite bound: too few observations for one."""

    low: float
    loss: float
    high: float


BoundsAt = Callable[[float, float], Bounds]  # by the levels of the lower and of the upper bound


def as_share(log_loss: float) -> float:
    """A loss as the share of the baseline's figure that is gone; negative for a gain."""
    return 1 - exp(-log_loss)


class FigureTest:
    """The test of one figure. `bounds` and `verdict` are those of the last look."""

    def __init__(self, margin: float, false_alarm: float, missed: float = MISSED) -> None:
        assert 0 < margin < 1, "a margin is a share of the baseline's figure"
        self.log_margin = -log(1 - margin)
        self.false_alarm = false_alarm
        self.missed = missed
        self.verdict = Verdict.UNDECIDED
        self.bounds: Bounds | None = None
        self._spent = 0.0

    @property
    def is_over(self) -> bool:
        """Decided, or without anything left to spend."""
        return self.verdict is not Verdict.UNDECIDED or self._spent >= 1

    def look(self, time_share: float, bounds_at: BoundsAt) -> Verdict:
        """Decide at the share `time_share` (0..1, growing) of the gate's time."""
        spent = error_spent(time_share)
        free = spent - self._spent
        if self.is_over or free <= 0:
            return self.verdict
        self._spent = spent
        self.bounds = bounds_at(self.false_alarm * free, self.missed * free)
        if self.bounds.high < self.log_margin:
            self.verdict = Verdict.PASS
        elif self.bounds.low > 0:
            self.verdict = Verdict.REGRESSION
        return self.verdict


def overall(verdicts: list[Verdict]) -> Verdict:
    """One figure that lost is a regression; a pass needs all of them."""
    if Verdict.REGRESSION in verdicts:
        return Verdict.REGRESSION
    return Verdict.PASS if set(verdicts) == {Verdict.PASS} else Verdict.UNDECIDED


def speed_bounds(losses_N: ArrayLike) -> BoundsAt:
    """Bounds of the loss of speed, from the log losses of N rounds."""
    losses = np.asarray(losses_N, dtype=float)

    def at(low_level: float, high_level: float) -> Bounds:
        low, loss, high = signed_rank_bounds(losses, low_level, high_level)
        return Bounds(low=low, loss=loss, high=high)

    return at


def clusters_for_tau(prompts_each: int, workload: int | None) -> int:
    """How many clusters of `prompts_each` prompts a verdict about tau needs. `workload`: its prompts, where the verdict
    is about them; None where they are a sample."""
    prompts = PROMPTS_FOR_TAU if workload is None else min(PROMPTS_FOR_TAU, workload / 2)
    return max(2, ceil(prompts / prompts_each))


def tau_bounds(steps_C2: ArrayLike, accepted_C2: ArrayLike, *, population: int | None, needed: int) -> BoundsAt:
    """Bounds of the loss of tau, from verify steps and accepted drafts, which are summed over the answers of (baseline,
    candidate) to each of C clusters.

    Args:
        population: clusters of the workload, where their answers are always the same; None where they are drawn.
        needed: clusters without which there are no bounds.

    Both have taken a step.
    """
    steps, accepted = np.asarray(steps_C2, dtype=float), np.asarray(accepted_C2, dtype=float)
    n, totals = len(steps), steps.sum(axis=0)
    assert (totals > 0).all(), "tau is a ratio to the verify steps"
    tau = 1 + accepted.sum(axis=0) / totals
    influence_C2 = (steps + accepted - tau * steps) / (totals * tau)
    loss = float(np.log(tau[0] / tau[1]))
    squares = (influence_C2[:, 0] - influence_C2[:, 1]) ** 2
    unseen = 1.0 if population is None else 1 - n / population
    error = float(np.sqrt(unseen * n / max(n - 1, 1) * squares.sum()))

    def at(low_level: float, high_level: float) -> Bounds:
        if n < needed:
            return Bounds(low=-np.inf, loss=loss, high=np.inf)
        low, high = (float(stats.t.isf(level, n - 1)) * error for level in (low_level, high_level))
        return Bounds(low=loss - low, loss=loss, high=loss + high)

    return at


def next_look(rounds: int) -> int:
    """After how many rounds to look again."""
    return max(FIRST_LOOK, -(-rounds * 5 // 4))
