"""Live swap: replace drafter and head in a running scheduler, without a restart."""

import logging
from typing import Any

from sglang_ext.adapter.metrics import metrics
from sglang_ext.drafters.checkpoint import origins, read_tensors
from sglang_ext.drafters.checkpoint_config import read_info

logger = logging.getLogger(__name__)

STILL_RUNNING = "cannot swap the drafter while requests are running"
NOT_CAPTURED = "could not be captured in CUDA graphs"  # said where no drafter is left


def swap_drafter(scheduler: Any, path: str, resident: int = 0) -> None:
    """Installed as `Scheduler.rayspec_swap_drafter`, called through `Engine.collective_rpc` on every rank.

    Graphs of the draft passes are captured again, but for one that has stayed: so many that ran before stay beside the
    running one, where a worker can keep them (`resident`). Raises ValueError where the checkpoint does not fit, and
    RuntimeError while requests run; the drafter is then unchanged. Raises RuntimeError with `NOT_CAPTURED` where none
    is left.
    """
    worker = scheduler.draft_worker.draft_worker
    if not hasattr(worker, "swap"):
        raise ValueError(
            f"the running {type(worker).__name__} is none of rayspec's; start the engine with a drafter of rayspec"
        )
    worker.check_swappable()
    if not scheduler.flush_cache():
        raise RuntimeError(f"{STILL_RUNNING}; wait for them to finish")
    info = read_info(path)
    found = origins(info)
    worker.resident = resident
    if not worker.run_again(info, found):
        worker.swap(info, read_tensors(info, worker.held(found)), found)
    if (counters := metrics()) is not None:
        counters.swapped()
    logger.info("drafter swapped to %s (head %s)", path, info.head)
