"""Where the time of a speculative step goes on the CPU platform, where host time is the time.

`StepClock` counts over the life of the scheduler; readers take differences. On an accelerator host time says nothing,
so that nothing is counted there.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2


@dataclass
class StepClock:
    """Counts and seconds since the start, over all decode steps (prefill is not counted)."""

    steps: int = 0
    requests: int = 0  # of all steps, each as often as it took part in one
    verified_tokens: int = 0  # of all of these, roots and padding included
    head_s: float = 0.0  # the draft head, all draft positions of the step
    draft_s: float = 0.0  # drafting with the head: the draft loop and the extend after verification
    verify_s: float = 0.0  # the target's verification pass with sampling and cache moves
    is_decoding: bool = False

    @contextmanager
    def head(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.is_decoding:
            self.head_s += time.perf_counter() - start


CLOCK = StepClock()


class TimedEagleWorker(EAGLEWorkerV2):
    """SGLang's EAGLE worker with a clock around it. What it computes is unchanged, but that a step may verify fewer
    nodes than the one before."""

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        CLOCK.is_decoding = not batch.forward_mode.is_extend()
        if not CLOCK.is_decoding:
            return super().forward_batch_generation(batch, *args, **kwargs)
        start, verified_before = time.perf_counter(), CLOCK.verify_s
        result = super().forward_batch_generation(batch, *args, **kwargs)
        CLOCK.steps += 1
        CLOCK.draft_s += time.perf_counter() - start - (CLOCK.verify_s - verified_before)
        return result

    def verify(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        start, requests = time.perf_counter(), batch.batch_size()
        self.speculative_num_draft_tokens = batch.spec_info.draft_token_num  # of this step
        result = super().verify(batch, *args, **kwargs)
        CLOCK.verify_s += time.perf_counter() - start
        CLOCK.requests += requests
        CLOCK.verified_tokens += requests * self.speculative_num_draft_tokens
        return result


class TimedStandaloneWorker(TimedEagleWorker, StandaloneWorkerV2):
    """The same around the worker of independent drafters."""


def write_step_clock(scheduler: Any, path: str) -> None:
    """Installed as `Scheduler.rayspec_write_step_clock`: the clock as JSON (an RPC carries no answer). Every rank is
    called, and ranks of other nodes do not have the path."""
    if get_parallel().tp_rank == 0:
        Path(path).write_text(json.dumps(asdict(CLOCK)))
