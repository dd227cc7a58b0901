"""Runs the cohorts of a sweep as trials of Ray Tune: which of them, how many at once, and which are given up early."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# ours is the one progress bar, and Ctrl-C is handled by who called
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")

from ray import tune
from ray.actor import ActorHandle
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler

from rayspec.sweep.config import SweepConfig
from rayspec.sweep.engines import engine_resources
from rayspec.sweep.measured import SweepState
from rayspec.sweep.plan import Cohort, Plan
from rayspec.sweep.prepare import Prepared
from rayspec.sweep.trainable import METRIC, CohortTrainable, RemoteJournal, cohort_of


def run_cohorts(prepared: Prepared, journal: ActorHandle, state: SweepState, log_folder: Path) -> None:
    """Measure what the journal, whose content is `state`, lacks. Failures are in the journal afterwards."""
    config, plan = prepared.config, prepared.plan
    cohorts = chosen(config, plan, state)
    if not cohorts:
        return
    cpus, gpus = engine_resources(config)
    # the trial's own process needs no core, and one bundle keeps the pair of engines on one node
    bundles = tune.PlacementGroupFactory([{}, {k: 2 * v for k, v in (("CPU", cpus), ("GPU", gpus)) if v}])
    trainable = tune.with_parameters(CohortTrainable, prepared=prepared, journal=journal, log_folder=log_folder)
    with TemporaryDirectory(prefix="rayspec-tune-") as folder:  # nothing in it is needed again: the journal is
        tune.Tuner(
            tune.with_resources(trainable, bundles),
            param_space={"cohort": tune.grid_search([c.name for c in cohorts])},
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="max",
                scheduler=scheduler(config),
                reuse_actors=True,
                max_concurrent_trials=config.search.max_concurrent or (None if gpus else 1),
            ),
            run_config=tune.RunConfig(
                name="cohorts",
                storage_path=folder,
                verbose=0,
                callbacks=[Endings(plan, RemoteJournal(journal))],
                failure_config=tune.FailureConfig(max_failures=config.ray.max_failures),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            ),
        ).fit()


def chosen(config: SweepConfig, plan: Plan, state: SweepState) -> Sequence[Cohort]:
    """The cohorts to run. One that has ended is run again, without measuring, for a scheduler that compares."""
    cohorts = list(plan.cohorts)
    if config.search.algorithm == "random":
        random.Random(config.seed).shuffle(cohorts)
    cohorts = cohorts[: plan.num_cohorts]
    return cohorts if config.search.early_stop else [c for c in cohorts if c.name not in state.ended]


def scheduler(config: SweepConfig) -> TrialScheduler:
    """Who is given up between passes. The candidates of one cohort are compared in the cohort, by their intervals."""
    early = config.search.early_stop
    if early is None or config.search.algorithm == "grid":
        return FIFOScheduler()
    return ASHAScheduler(
        time_attr="training_iteration",
        max_t=config.max_passes(),
        grace_period=min(early.grace_passes, config.max_passes()),
        reduction_factor=early.reduction_factor,
    )


class Endings(tune.Callback):
    """Writes into the journal how cohorts ended that could not do it themselves."""

    def __init__(self, plan: Plan, journal: RemoteJournal) -> None:
        self.plan = plan
        self.journal = journal

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        name = cohort_of(self.plan, trial.config).name
        self.journal.append({"event": "ended", "cohort": name, "reason": "given up early"})

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        cohort = cohort_of(self.plan, trial.config)
        error = trial.get_error()
        cause = f"the cohort {cohort.name} failed {trial.num_failures} times, the last time with {error}"
        for member in cohort.trials:
            self.journal.append({"event": "failed", "cohort": cohort.name, "trial": member.name, "cause": cause})
        self.journal.append({"event": "ended", "cohort": cohort.name, "reason": "failed"})
