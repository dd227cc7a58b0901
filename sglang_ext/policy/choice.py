"""The draft length of the next step: the one with the most expected tokens per second. Now and then a longer one is
tried for a few steps: what is not drafted is never seen to be accepted, so that an estimate that is too low by chance
would stay so.

The choice may look at everything that was known before the step's drafts were drawn: how many requests it serves, and
what the steps before accepted. It never sees its own drafts: a draft length that depends on what was drafted changes
the distribution of the emitted tokens at T > 0 (tests/sglang_ext/test_policy_distributions.py holds one that does, and
finds it out). Nor does it look at a clock, so that all ranks of a tensor-parallel engine choose alike."""

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.policy.acceptance import Acceptance
from sglang_ext.policy.table import PolicyTable

ENOUGH_DRAFTED = 0.5  # share of the requests of a step that a try must be able to draft for


@dataclass(frozen=True)
class Choice:
    """`keeps_up`: whether the drafter's cache is filled although nothing may be drafted, for the steps to come."""

    draft_steps: int
    keeps_up: bool


class MeasuredPolicy:
    """Chooses for one step after another; what became of them comes in the same order, maybe some steps late."""

    def __init__(self, table: PolicyTable, *, start: int) -> None:
        self.table = table
        self.acceptance = Acceptance(
            table.accepted_if_reached,
            prior_verifications=table.prior_verifications,
            half_life_steps=table.half_life_steps,
            concentration=table.request_concentration,
        )
        self.choice = Choice(start, keeps_up=True)
        self.rates: dict[int, float] = {}  # tokens a millisecond and request that the choice stands on, by draft length
        self.steps: Counter[int] = Counter()  # by draft length
        self.switches = 0
        self.lost = 0  # results that belonged to no step
        self._since_switch = table.dwell_steps
        self._without_gain = 0  # steps in a row in which no draft would pay
        self._try_left = 0  # steps of the try that goes on
        self._untried_ms = math.inf  # since the length that is worth a try was drafted
        self._pending: deque[tuple[int, tuple[tuple[Hashable, bool], ...]]] = deque()

    def choose(self, is_drafted: Mapping[Any, bool]) -> Choice:
        """For a step of these requests (by anything hashable), of which there are some; False for those whose drafter's
        cache has holes, which accept nothing."""
        # those that have ended, too, while results of theirs are still to come
        self.acceptance.keep([*is_drafted, *(request for _, step in self._pending for request, _ in step)])
        requests, share = len(is_drafted), sum(is_drafted.values()) / len(is_drafted)
        rates = self._rates([request for request, drafts in is_drafted.items() if drafts], requests)
        self.rates = rates
        rates_for_all = rates if share == 1 else self._rates(list(is_drafted), requests)
        now, best = self.choice.draft_steps, self._best(rates)
        best_for_all = self._best(rates_for_all)
        tried = self._worth_a_try(requests, rates_for_all[best_for_all])
        could_try = share > 0 and tried > best_for_all
        if could_try and share >= ENOUGH_DRAFTED and self._is_due(tried, requests, best_for_all, rates):
            self._try_left, self._untried_ms = self.table.try_steps, 0.0
        if self._try_left:
            self._try_left -= 1
            best = max(best, tried)
        if best != now and self._since_switch >= self.table.dwell_steps:
            self.switches += 1
            self._since_switch, now = 0, best
        self._since_switch += 1
        self._untried_ms = 0.0 if 0 < tried <= now else self._untried_ms + self.table.step_ms(now, requests)
        self._without_gain = 0 if best_for_all > 0 else self._without_gain + 1
        # a try waits until enough requests have come that the drafter has followed
        waits = could_try and self._is_due(tried, requests, best_for_all, rates_for_all)
        self.choice = Choice(now, keeps_up=now > 0 or waits or self._without_gain < self.table.rest_after_steps)
        self.steps[now] += 1
        self._pending.append((now, tuple(is_drafted.items())))
        return self.choice

    def see(self, accepted: Sequence[int]) -> None:
        """Accepted drafts of each request of the oldest step that was chosen for and not yet seen."""
        if not self._pending or len(self._pending[0][1]) != len(accepted):
            self.lost += 1
            self._pending.clear()
            return
        drafted, requests = self._pending.popleft()
        seen = zip(requests, accepted, strict=True)
        self.acceptance.see(drafted, [(request, count) for (request, drafts), count in seen if drafts])

    def tokens_per_ms(self, draft_steps: int, requests: int) -> float:
        """Expected of each request of a step, where all of them are new."""
        return self.acceptance.tokens(draft_steps) / self.table.step_ms(draft_steps, requests)

    def _rates(self, drafted: Sequence[Hashable], requests: int) -> dict[int, float]:
        """The same by draft length, of `requests` of which these are drafted for."""
        drafts = {k: sum(self.acceptance.tokens(k, request) - 1 for request in drafted) for k in self.table.lengths}
        return {k: (1 + drafts[k] / requests) / self.table.step_ms(k, requests) for k in self.table.lengths}

    def _best(self, rates: Mapping[int, float]) -> int:
        """The present length, a shorter one that promises more, or a longer one that promises clearly more."""
        now = self.choice.draft_steps
        worth = {k: rate / (1 + self.table.margin) if k > now else rate for k, rate in rates.items()}
        return max(self.table.lengths, key=lambda k: (worth[k], k == now, -k))

    def _worth_a_try(self, requests: int, rate: float) -> int:
        """The longest draft that would give more tokens a millisecond if all of it were accepted; else 0."""
        return max((k for k in self.table.lengths if (k + 1) / self.table.step_ms(k, requests) > rate), default=0)

    def _is_due(self, tried: int, requests: int, best: int, rates: Mapping[int, float]) -> bool:
        """Whether what a try is expected to lose is small beside the time since the last one. It counts as one plain
        step at least: the switches and what the drafter reads for it are not in the curves."""
        loss_ms = self.table.try_steps * self.table.step_ms(tried, requests) * (1 - rates[tried] / rates[best])
        return max(loss_ms, self.table.step_ms(0, requests)) <= self.table.try_cost * self._untried_ms
