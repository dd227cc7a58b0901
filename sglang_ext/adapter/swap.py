"""Live swap: replace drafter and head in a running scheduler, without a restart."""

import logging
from functools import partial
from typing import Any

import torch

from sglang_ext.adapter.metrics import metrics
from sglang_ext.adapter.ranks import RanksDiffer, in_step, on_all_ranks, said_by_all
from sglang_ext.drafters.checkpoint import origins, read_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, read_info
from sglang_ext.fingerprints import combined_sha256

logger = logging.getLogger(__name__)

STILL_RUNNING = "cannot swap the drafter while requests are running"
NOT_CAPTURED = "could not be captured in CUDA graphs"  # said where no drafter is left


def swap_drafter(scheduler: Any, path: str, resident: int = 0) -> None:
    """Installed as `Scheduler.rayspec_swap_drafter`, called through `Engine.collective_rpc` on every rank.

    Graphs of the draft passes are captured again, but for one that has stayed: so many that ran before stay beside the
    running one, where a worker can keep them (`resident`). Raises ValueError where the checkpoint does not fit or is
    not the same on all ranks, RanksDiffer where some cannot read it, and RuntimeError while requests run, or where
    there is no memory for it beside the running one; the drafter is then unchanged. Raises RuntimeError with
    `NOT_CAPTURED` where none is left: on all ranks, where a capture fails on some. After a failed capture several ranks
    take no other drafter, since what they have promised each other for graphs may differ. (Where one leaves a pass in
    which others already reduce on the GPU, or an exchange of SGLang's custom all-reduce, they wait until SGLang's
    watchdog ends that.)
    """
    worker = scheduler.draft_worker.draft_worker
    if not hasattr(worker, "check_swappable"):
        raise ValueError(
            f"the running {type(worker).__name__} is none of rayspec's; start the engine with a drafter of rayspec"
        )
    worker.check_swappable()
    if worker.lost is not None:
        raise RuntimeError(worker.lost)
    if not scheduler.flush_cache():
        raise RuntimeError(f"{STILL_RUNNING}; wait for them to finish")
    worker.resident = resident
    together = partial(on_all_ranks, scheduler.tp_group)
    info, found = together(lambda: _looked_up(path))  # a node may lack the files
    if len(set(said_by_all(scheduler.tp_group, combined_sha256(found)))) > 1:
        raise ValueError(f"the files of {path} are not the same on all nodes; bring the same ones to each")
    stay = said_by_all(scheduler.tp_group, "here" if worker.stays(info, found) else "read")
    if set(stay) == {"here"}:
        worker.run_again(info, found)
    else:
        tensors = together(lambda: read_tensors(info, worker.held(found)))
        try:
            together(lambda: worker.host(info, tensors, found))
        except RanksDiffer as error:
            worker.refusal = f"the draft passes of {path} {NOT_CAPTURED} ({error}); swap in another, or start anew"
            raise RuntimeError(worker.refusal) from error
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"there is no memory for {path} beside the running drafter, which stays until the other is whole "
                f"({str(error).splitlines()[0]}); start anew with it, or with a lower --mem-fraction-static"
            ) from error
        try:
            in_step(scheduler.tp_group, worker.capture)
        except RuntimeError as error:
            if scheduler.tp_group.world_size == 1:
                raise
            cause = error if isinstance(error, RanksDiffer) else error.__cause__ or error
            worker.refusal = worker.lost = (
                f"the draft passes of {path} {NOT_CAPTURED} by all ranks ({str(cause).splitlines()[0]}), which can be "
                "mended by no other swap; start anew, with a lower --mem-fraction-static if memory was short"
            )
            raise RuntimeError(worker.lost) from error
    if (counters := metrics()) is not None:
        counters.swapped()
    logger.info("drafter swapped to %s (head %s)", path, info.head)


def _looked_up(path: str) -> tuple[CheckpointInfo, dict[str, str]]:
    info = read_info(path)
    return info, origins(info)
