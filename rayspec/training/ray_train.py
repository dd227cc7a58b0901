"""Training by several processes: the shell of Ray Train (v2) around the loop in drafter.py.

Ray Train starts the workers, joins them in a process group of torch.distributed, and starts all of them again when one
has died. The training itself survives by its own checkpoints (train_state.py), as it does without Ray: a worker that is
started goes on from the newest one. Folders of the target, the answers and the training are read by every worker, so on
several machines they lie in a file system that all share.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.device_mesh import init_device_mesh

from rayspec.farm.actor import cluster
from rayspec.farm.processes import environment
from rayspec.training.acceptance import Acceptance
from rayspec.training.data.answers import read_answers
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import Group
from rayspec.training.hidden_states import with_states
from rayspec.training.prepare import SETS

logger = logging.getLogger(__name__)


class WorkersFailed(ChildProcessError):
    """The workers died more often than `workers.max_failures` allows, or could not run at all."""


class _Trainer(TorchTrainer):
    def _register_sigint_handler(self, controller: Any) -> None:
        """Ctrl-C stays what it is: Ray's handler would end this process with exit code 0. The workers end with the
        connection to Ray."""


def train_by_workers(config: DrafterTrainConfig, head: DrafterEntry, target_sha256: str) -> Acceptance:
    """`train_drafter` on `config.workers`; answers and held-out ones are there. Raises FloatingPointError as it does,
    and WorkersFailed."""
    workers = config.workers
    assert workers is not None, "the caller looked"
    log = log_file(config, head)
    with cluster(None, min_cpus=workers.count * workers.num_cpus):
        _warn_of_wait(workers.count * workers.num_cpus, workers.count * workers.num_gpus)
        print(f"{head.name}: training on {workers.count} worker(s); log in {log}", flush=True)
        trainer = _Trainer(
            _work,
            train_loop_config={"config": config, "head": head, "target_sha256": target_sha256},
            scaling_config=train.ScalingConfig(
                num_workers=workers.count,
                use_gpu=bool(workers.num_gpus),
                resources_per_worker={"CPU": workers.num_cpus, "GPU": workers.num_gpus},
            ),
            run_config=train.RunConfig(
                name=head.name,
                storage_path=str((config.work_folder / "ray").resolve()),
                failure_config=train.FailureConfig(max_failures=workers.max_failures),
            ),
        )
        try:
            with environment({"RAY_CHDIR_TO_TRIAL_DIR": "0"}):  # paths of the configuration are relative to here
                found = trainer.fit().return_value
        except train.TrainingFailedError as error:
            raise WorkersFailed(_what_failed(head, error, log)) from error
    if isinstance(found, FloatingPointError):
        raise found
    return Acceptance(**found)


def log_file(config: DrafterTrainConfig, head: DrafterEntry) -> Path:
    """Where the first worker writes its progress."""
    return config.work_folder / "logs" / f"train-{head.name}.log"


def _work(asked: dict[str, Any]) -> dict[str, Any] | FloatingPointError | None:
    """One worker, from its start to the export. What every further attempt would meet again is returned, since Ray
    Train tries again after whatever is raised."""
    config: DrafterTrainConfig = asked["config"]
    workers = config.workers
    assert workers is not None, "the driver looked"
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = get_device() if workers.num_gpus else torch.device("cpu")
    group = Group.joined()
    with ExitStack() as stack:
        if group.is_writer:
            path = log_file(config, asked["head"])
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a"))
            stack.enter_context(redirect_stdout(log))
            stack.enter_context(redirect_stderr(log))
        target = FrozenTarget.load(
            config.target_folder,
            config.recipe.target_dtype,
            device=device,
            shards=init_device_mesh(device.type, (group.size,)) if workers.shard_target else None,
            sha256=asked["target_sha256"],
        )
        answers, held_out = sets = tuple(read_answers(config.work_folder / name) for name in SETS)
        target = with_states(config, target, sets)  # which are stored by now
        try:
            return train_drafter(config, asked["head"], target, answers, held_out, group=group).to_dict()
        except FloatingPointError as error:
            return error


def _warn_of_wait(cpus: int, gpus: int) -> None:
    """A cluster may still grow, so that what is missing is no error."""
    there = ray.cluster_resources()
    for kind, wanted in (("CPU", cpus), ("GPU", gpus)):
        if there.get(kind, 0) < wanted:
            logger.warning(
                "workers ask for %d %ss, the Ray cluster has %g; waiting until it has more (workers.count, "
                "workers.num_cpus, workers.num_gpus)",
                wanted,
                kind,
                there.get(kind, 0),
            )


def _what_failed(head: DrafterEntry, error: train.TrainingFailedError, log: Path) -> str:
    causes = error.worker_failures if isinstance(error, train.WorkerGroupError) else {}
    lines = [f"worker {rank}: {_last_line(cause)}" for rank, cause in sorted(causes.items())] or [_last_line(error)]
    attempts = "; ".join(lines)
    return (
        f"{head.name}: training failed on its workers ({attempts}). Its progress is in {log}. The same command goes on "
        "from the newest checkpoint; a larger workers.max_failures tries more often by itself"
    )


def _last_line(error: BaseException) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()
