"""A plugin of SGLang for aa_sweep.py: a drafter whose folder is called `slow` makes every pass of the engine longer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ext.adapter.patches import wrap

SLOW = "slow"
SLOWDOWN = 0.1  # of every forward pass's time
TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def register() -> None:
    wrap(TARGET, create_worker)


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    from sglang_ext.adapter.workers.timed import TimedEagleWorker

    worker = original(algorithm, server_args)
    forward = TimedEagleWorker.forward_batch_generation

    def forward_slowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = forward(self, *args, **kwargs)
        if Path(self.draft_worker.draft_runner.model.info.path).name == SLOW:
            time.sleep(SLOWDOWN * (time.perf_counter() - start))
        return result

    TimedEagleWorker.forward_batch_generation = forward_slowed  # type: ignore[method-assign]
    return worker
