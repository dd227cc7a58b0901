"""SGLang's workers with the step clock around them, and counters for `/metrics`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from sglang_ext.adapter.metrics import metrics
from sglang_ext.adapter.step_clock import CLOCK
from sglang_ext.adapter.workers.policy import FollowsPolicy


class TimedEagleWorker(FollowsPolicy):
    """SGLang's EAGLE worker with a clock around it. What it computes is unchanged, but that a step may verify fewer
    nodes than the one before, or take a draft length of a policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        CLOCK.start_noting()
        super().__init__(*args, **kwargs)
        metrics()  # there from the start, so that servers are counted that nobody has asked yet

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        CLOCK.is_decoding, CLOCK.running = not batch.forward_mode.is_extend(), batch.batch_size()
        if CLOCK.is_decoding and CLOCK.is_counting:
            CLOCK.totals.steps += 1
        with CLOCK.noting(batch.batch_size()), CLOCK.part("step_s"):
            result = super().forward_batch_generation(batch, *args, **kwargs)
        if CLOCK.is_decoding and (counters := metrics()) is not None:
            counters.stepped(batch.batch_size(), self.speculative_num_steps)
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)
        if (counters := metrics()) is not None:
            counters.accepted(num_correct_drafts_per_req)

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.speculative_num_draft_tokens = batch.spec_info.draft_token_num  # of this step
        with self._verifying(batch):
            return super().verify(batch, *args, **kwargs)

    def decode_plainly(self, batch: Any) -> Any:
        with self._verifying(batch):
            return super().decode_plainly(batch)

    @contextmanager
    def _verifying(self, batch: Any) -> Iterator[None]:
        if CLOCK.is_decoding and CLOCK.is_counting:
            CLOCK.totals.requests += batch.batch_size()
            CLOCK.totals.verified_tokens += batch.batch_size() * self.speculative_num_draft_tokens
        with CLOCK.part("verify_s"):
            yield


class TimedStandaloneWorker(TimedEagleWorker, StandaloneWorkerV2):
    """The same around the worker of independent drafters."""


def timed(worker: Any) -> Any:
    """SGLang's class of a worker, with a clock where there is one for it."""
    return {EAGLEWorkerV2: TimedEagleWorker, StandaloneWorkerV2: TimedStandaloneWorker}.get(worker, worker)
