"""A plugin of SGLang for aa_sweep.py: a drafter whose folder is called `slow` makes every pass of the engine longer."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW = "slow"
SLOWDOWN = 0.1  # of every forward pass's time
TARGET = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, create_worker, HookType.AROUND)


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_ext.adapter.step_clock import TimedEagleWorker

    worker = original(algorithm, server_args)
    swap, forward = Scheduler.rayspec_swap_drafter, TimedEagleWorker.forward_batch_generation
    running = {"drafter": Path(server_args.speculative_draft_model_path).name}

    def swap_noted(scheduler: Any, path: str) -> None:
        swap(scheduler, path)
        running["drafter"] = Path(path).name

    def forward_slowed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = forward(self, *args, **kwargs)
        if running["drafter"] == SLOW:
            time.sleep(SLOWDOWN * (time.perf_counter() - start))
        return result

    Scheduler.rayspec_swap_drafter = swap_noted
    TimedEagleWorker.forward_batch_generation = forward_slowed  # type: ignore[method-assign]
    return worker
