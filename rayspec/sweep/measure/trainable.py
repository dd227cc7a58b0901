"""The Tune trial: a cohort. A thin shell around CohortRun that keeps the engines from one cohort to the next.

It saves no checkpoint of its own: what it has measured is in the journal, from which it goes on after any death.
"""

import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayspec.disk import is_full
from rayspec.sweep.measure.cohort import CohortRun
from rayspec.sweep.measure.engines import Engines
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.plan.trials import Cohort, Plan
from rayspec.sweep.record.events import Event
from rayspec.sweep.record.journal import Journal

METRIC = "speedup_vs_plain"
RETRY_S = 2.0  # on a disk that is full


class JournalFailed(RuntimeError):
    """The journal's disk refuses, and not because it is full."""


class RemoteJournal:
    """The journal's actor, as a JournalWriter."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    def append(self, event: Event) -> None:
        """Waits for as long as the disk is full: what was measured is not measured again for that. Raises JournalFailed
        for anything else that it refuses."""
        while True:
            try:
                return ray.get(self._actor.append.remote(event))
            except RayTaskError as error:
                if not isinstance(error.cause, OSError):
                    raise
                if not is_full(error.cause):
                    raise JournalFailed(f"the journal cannot be written: {error.cause}") from None
            time.sleep(RETRY_S)

    def read(self, cohort: str) -> list[Event]:
        return ray.get(self._actor.read.remote(cohort))

    def refusal(self) -> str | None:
        """Why the last write failed; None where it did not, or where the actor does not say at once."""
        try:
            return ray.get(self._actor.refusal.remote(), timeout=RETRY_S)
        except (GetTimeoutError, RayActorError):
            return None


def journal_actor(path: Path) -> ActorHandle:
    """Start the journal's one writer on this node. It comes back if it dies, and writes nothing twice."""
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    actor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(Journal)
    return actor.remote(str(path))


class CohortTrainable(tune.Trainable):
    """One step is one pass over the workload; another cohort is a reset."""

    def setup(
        self,
        config: dict[str, Any],
        *,
        prepared: Prepared,
        placement: Placement,
        journal: ActorHandle,
        log_folder: Path,
    ) -> None:
        self.prepared = prepared
        self.journal = RemoteJournal(journal)
        self.engines = self.make_engines(prepared, placement, log_folder)
        self.reset_config(config)

    def make_engines(self, prepared: Prepared, placement: Placement, log_folder: Path) -> Engines:
        return Engines(prepared.config, placement, prepared.target, log_folder)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        cohort = cohort_of(self.prepared.plan, new_config)
        self.run = CohortRun(self.prepared, cohort, self.engines, self.journal)
        return True

    def step(self) -> dict[str, Any]:
        done = self.run.one_pass()
        return {METRIC: done.speedup_vs_plain, "done": done.is_done}

    def cleanup(self) -> None:
        self.engines.stop()


def cohort_of(plan: Plan, config: dict[str, Any]) -> Cohort:
    """The cohort that a Tune trial's config means."""
    return next(c for c in plan.cohorts if c.name == config["cohort"])
