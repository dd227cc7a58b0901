"""What SGLang's `/metrics` does not count: counters of this scheduler, which appear there beside its own.

Prometheus' client adds up the processes of a server through files (`PROMETHEUS_MULTIPROC_DIR`, which SGLang sets), so a
counter that is made in a scheduler needs no other way out.
"""

from collections.abc import Sequence
from functools import cache

from sglang.srt.runtime_context import get_observability, get_parallel

from sglang_ext.adapter.step_clock import CLOCK, StepTotals


class ServingMetrics:
    """Counters of speculative decoding: tau over any window is `1 + rate(accepted drafts) / rate(verified requests)` of
    the verified requests that drafted (`draft_steps` not 0)."""

    def __init__(self) -> None:
        from prometheus_client import Counter  # reads the environment when it is imported

        self._verified = Counter(
            "rayspec_verified_requests",
            "Verify steps, each as often as a request took part in one, by their number of draft steps (0: plain).",
            ["draft_steps"],
        )
        self._accepted = Counter(
            "rayspec_accepted_drafts", "Drafts that were accepted, by their position from 1.", ["position"]
        )
        self._drafted = Counter(
            "rayspec_drafted",
            "Verify steps that drafted as far as a position from 1, each as often as a request took part in one.",
            ["position"],
        )
        self._seconds = Counter(
            "rayspec_step_seconds",
            "Time of decode steps by part: head, draft (without the head), verify. On an accelerator draft has the "
            "head's time in it.",
            ["part"],
        )
        CLOCK.start()
        self._swaps = Counter("rayspec_drafter_swaps", "Drafters put into the running server.")
        self._switches = Counter(
            "rayspec_policy_switches", "Changes of the draft length by the policy.", ["before", "after"]
        )
        self._counted = StepTotals()

    def stepped(self, requests: int, draft_steps: int) -> None:
        """A decode step was launched. Where host time is the time, it has ended; on an accelerator the seconds of steps
        before it are counted, those that have ended."""
        self._verified.labels(draft_steps).inc(requests)
        for position in range(1, draft_steps + 1):
            self._drafted.labels(position).inc(requests)
        now, before = CLOCK.read_ended().copy(), self._counted
        self._counted = now
        head, verify = now.head_s - before.head_s, now.verify_s - before.verify_s
        draft = now.step_s - before.step_s - head - verify
        for part, seconds in (("head", head), ("draft", draft), ("verify", verify)):
            self._seconds.labels(part).inc(max(0.0, seconds))

    def accepted(self, drafts: Sequence[int]) -> None:
        """Count the accepted drafts of each request of a verify step."""
        for position in range(1, max(drafts, default=0) + 1):
            self._accepted.labels(position).inc(sum(n >= position for n in drafts))

    def swapped(self) -> None:
        self._swaps.inc()

    def switched(self, before: int, after: int) -> None:
        self._switches.labels(before, after).inc()


@cache
def metrics() -> ServingMetrics | None:
    """None where the server has none (`--enable-metrics`), and on ranks beside the first."""
    return ServingMetrics() if get_observability().enable_metrics and get_parallel().tp_rank == 0 else None
