"""Training by several processes: the shell of Ray Train (v2) around the loop in drafter.py.

Ray Train starts the workers, joins them in a process group of torch.distributed, and starts all of them again when one
has died. The training itself survives by its own checkpoints (train_state.py), as it does without Ray: a worker that is
started goes on from the newest one. Folders of the target, the answers and the training are read by every worker, so on
several machines they lie in a file system that all share.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.device_mesh import init_device_mesh

from rayspec.farm.actor import cluster
from rayspec.farm.processes import environment
from rayspec.home import home, tracking_uri
from rayspec.training.acceptance import Acceptance
from rayspec.training.data.answers import read_answers
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import SETS, DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.group import Group
from rayspec.training.hidden_states import with_states

logger = logging.getLogger(__name__)


class WorkersFailed(ChildProcessError):
    """The workers died more often than `workers.max_failures` allows, or could not run at all."""


class _Trainer(TorchTrainer):
    def _register_sigint_handler(self, controller: Any) -> None:
        """Ctrl-C stays what it is: Ray's handler would end this process with exit code 0. The workers end with the
        connection to Ray."""


@dataclass(frozen=True)
class _Asked:
    """What every worker is sent. Folders are in full, and `variables` of the environment say where names lead to."""

    config: DrafterTrainConfig
    target_sha256: str
    entry: DrafterEntry | None  # None: store hidden states, and train nothing
    log: Path  # the first worker's
    variables: dict[str, str]


def train_by_workers(config: DrafterTrainConfig, entry: DrafterEntry, target_sha256: str) -> Acceptance:
    """`train_drafter` on `config.workers`; answers and held-out ones are there. Raises FloatingPointError as it does,
    ValueError where a worker does not see the folders, and WorkersFailed."""
    return Acceptance(**_by_workers(config, entry, target_sha256, entry.name, log_file(config, entry)))


def states_by_workers(config: DrafterTrainConfig, target_sha256: str) -> None:
    """Store the hidden states of both sets of answers, on the workers' devices. Raises as `train_by_workers`."""
    log = config.work_folder / "logs" / "hidden-states.log"
    _by_workers(config, None, target_sha256, "hidden states", log)


def _by_workers(
    config: DrafterTrainConfig, entry: DrafterEntry | None, target_sha256: str, what: str, log: Path
) -> dict[str, Any]:
    workers = config.workers
    assert workers is not None, "asked for only where there is one"
    config.output_folder.mkdir(parents=True, exist_ok=True)  # by which a worker sees that it is not alone
    asked = _Asked(config, target_sha256, entry, Path(os.path.abspath(log)), _variables())
    with cluster(None, min_cpus=workers.count * workers.num_cpus):
        _warn_of_wait(workers.count * workers.num_cpus, workers.count * workers.num_gpus)
        print(f"{what}: {workers.count} worker(s) at it; log in {log}", flush=True)
        trainer = _Trainer(
            _work,
            train_loop_config={"asked": asked},
            scaling_config=train.ScalingConfig(
                num_workers=workers.count,
                use_gpu=bool(workers.num_gpus),
                resources_per_worker={"CPU": workers.num_cpus, "GPU": workers.num_gpus},
            ),
            run_config=train.RunConfig(
                name=what.replace(" ", "-"),
                storage_path=str(config.work_folder / "ray"),
                failure_config=train.FailureConfig(max_failures=workers.max_failures),
            ),
        )
        try:
            found = trainer.fit().return_value
        except train.TrainingFailedError as error:
            raise WorkersFailed(_what_failed(what, error, log)) from error
    if isinstance(found, FloatingPointError | ValueError):
        raise found
    return found


def _variables() -> dict[str, str]:
    """The variables of this process that say where names lead; no login, which each machine has by itself."""
    uri = tracking_uri()
    scheme, _, path = uri.rpartition(":///")
    if scheme == "sqlite" or "://" not in uri:  # a file, or a folder
        uri = f"{scheme}:///" * bool(scheme) + os.path.abspath(path)
    return {"RAYSPEC_HOME": str(home()), "MLFLOW_TRACKING_URI": uri}


def log_file(config: DrafterTrainConfig, entry: DrafterEntry) -> Path:
    """Where the first worker writes its progress."""
    return config.work_folder / "logs" / f"train-{entry.name}.log"


def _work(sent: dict[str, _Asked]) -> dict[str, Any] | FloatingPointError | ValueError:
    """One worker, from its start to the export. What every further attempt would meet again is returned, since Ray
    Train tries again after whatever is raised."""
    asked, group = sent["asked"], Group.joined()
    with ExitStack() as stack:
        stack.enter_context(environment(asked.variables))
        unseen = group.first_of(_unseen(asked.config, group.rank))
        if unseen is not None:
            return ValueError(unseen)
        if group.is_writer:
            asked.log.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(asked.log.open("a"))
            stack.enter_context(redirect_stdout(log))
            stack.enter_context(redirect_stderr(log))
        return _compute(asked, group)


def _compute(asked: _Asked, group: Group) -> dict[str, Any] | FloatingPointError:
    config = asked.config
    workers = config.workers
    assert workers is not None, "the driver looked"
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = get_device() if workers.num_gpus else torch.device("cpu")
    target = FrozenTarget.load(
        config.target_folder,
        config.target_dtype,
        device=device,
        shards=init_device_mesh(device.type, (group.size,)) if workers.shard_target else None,
        sha256=asked.target_sha256,
    )
    answers, held_out = sets = tuple(read_answers(config.work_folder / name) for name in SETS)
    target = with_states(config, target, sets, group)
    if asked.entry is None:
        return {}
    try:
        return train_drafter(config, asked.entry, target, answers, held_out, group=group).to_dict()
    except FloatingPointError as error:
        return error


def _unseen(config: DrafterTrainConfig, rank: int) -> str | None:
    """What a worker misses of what the process that started it sees; None where that is nothing."""
    try:
        config.target_folder  # noqa: B018  (raises ValueError)
        folders = {"work_dir": config.work_folder, "output_dir": config.output_folder}
        missing = [f"{name}={folder} is not there" for name, folder in folders.items() if not folder.is_dir()]
    except ValueError as error:
        missing = [str(error)]
    if not missing:
        return None
    return (
        f"worker {rank} on {socket.gethostname()}: {missing[0]}; all workers read the same folders, so put target, "
        "work_dir, output_dir and RAYSPEC_HOME into a file system that their machines share"
    )


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


def _what_failed(what: str, error: train.TrainingFailedError, log: Path) -> str:
    causes = error.worker_failures if isinstance(error, train.WorkerGroupError) else {}
    lines = [f"worker {rank}: {_last_line(cause)}" for rank, cause in sorted(causes.items())] or [_last_line(error)]
    attempts = "; ".join(lines)
    return (
        f"{what}: failed on its workers ({attempts}). Its progress is in {log}. The same command goes on "
        "from the newest checkpoint; a larger workers.max_failures tries more often by itself"
    )


def _last_line(error: BaseException) -> str:
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()
