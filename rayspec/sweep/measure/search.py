"""Runs the cohorts of a sweep as trials of Ray Tune: which of them, how many at once, and which are given up early."""

import logging
import os
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
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
from rayspec.sweep.measure.optuna_search import OptunaCohorts
from rayspec.sweep.measure.trainable import METRIC, CohortTrainable, RemoteJournal, cohort_of
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.plan.trials import Cohort, Plan
from rayspec.sweep.record.events import CohortEnded, TrialFailed
from rayspec.sweep.record.folder import SweepFolder
from rayspec.sweep.record.journal import GIVEN_UP
from rayspec.sweep.record.measured import SweepState

logger = logging.getLogger(__name__)
DISK_CHECK_S = 10.0
# what it would print of a failure, with a traceback through Ray, CohortEndings says in a line; that Tune cannot save
# its own state, on a disk that is full for a while, matters to nobody
for name in ("ray.tune.tune", "ray.tune.execution.tune_controller", "ray.tune.execution.experiment_state"):
    logging.getLogger(name).setLevel(logging.CRITICAL)


def run_cohorts(
    prepared: Prepared,
    placement: Placement,
    journal: ActorHandle,
    state: SweepState,
    folder: SweepFolder,
    trainable: type[CohortTrainable] = CohortTrainable,
) -> None:
    """Measure what the journal, whose content is `state`, lacks. Failures are in the journal afterwards."""
    config, plan = prepared.config, prepared.plan
    cohorts = chosen(config, plan, state)
    if not cohorts:
        return
    chooser = None
    if config.search.algorithm == "optuna":
        chooser = OptunaCohorts(plan.cohorts, list(state.begun), config.baseline, config.seed, METRIC)
    # the trial's own process needs no core; the pair of engines shares a node, or each of several
    bundles = tune.PlacementGroupFactory([{}, *[placement.bundle] * config.engine.nodes], strategy="STRICT_SPREAD")
    with_values = tune.with_parameters(
        trainable, prepared=prepared, placement=placement, journal=journal, log_folder=folder.logs
    )
    own = folder.path / "tune"  # nothing in it is needed again: the journal is
    shutil.rmtree(own, ignore_errors=True)
    tune.Tuner(
        tune.with_resources(with_values, bundles),
        param_space=None if chooser else {"cohort": tune.grid_search([c.name for c in cohorts])},
        tune_config=tune.TuneConfig(
            search_alg=chooser,
            num_samples=plan.num_cohorts if chooser else 1,
            metric=METRIC,
            mode="max",
            scheduler=scheduler(config),
            reuse_actors=True,
            max_concurrent_trials=config.search.max_concurrent or (None if placement.num_gpus else 1),
        ),
        run_config=tune.RunConfig(
            name=own.name,
            storage_path=str(folder.path),
            verbose=0,
            callbacks=[CohortEndings(plan, RemoteJournal(journal))],
            failure_config=tune.FailureConfig(max_failures=config.ray.max_failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    ).fit()
    shutil.rmtree(own, ignore_errors=True)


def chosen(config: SweepConfig, plan: Plan, state: SweepState) -> Sequence[Cohort]:
    """The cohorts to run. One that has ended is run again, without measuring, for those who learn from it."""
    cohorts = list(plan.cohorts)
    if config.search.algorithm == "random":
        random.Random(config.seed).shuffle(cohorts)
    cohorts = cohorts[: plan.num_cohorts]
    missing = [c for c in cohorts if c.name not in state.ended]
    if config.search.algorithm == "optuna":
        return cohorts if len(state.ended) < plan.num_cohorts else []
    is_compared = config.search.early_stop and config.search.algorithm != "grid"
    return cohorts if is_compared and missing else missing


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


class CohortEndings(tune.Callback):
    """Writes into the journal how cohorts ended that could not do it themselves."""

    def __init__(self, plan: Plan, journal: RemoteJournal) -> None:
        self.plan = plan
        self.journal = journal
        self._ask_at = 0.0
        self._refusal: str | None = None

    def on_step_begin(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        """Say it where cohorts wait for room on the disk; Tune comes here every few seconds."""
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + DISK_CHECK_S
        before, self._refusal = self._refusal, self.journal.refusal()
        if self._refusal and not before:
            logger.warning(
                "%s. Measuring waits until there is room, and nothing is lost (after Ctrl-C, --resume goes on)",
                self._refusal,
            )

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        name = cohort_of(self.plan, trial.config).name
        logger.warning("the actor of cohort %s or its node died; it goes on where its journal ends", name)

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        name = cohort_of(self.plan, trial.config).name
        self.journal.append(CohortEnded(cohort=name, reason=GIVEN_UP))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        cohort = cohort_of(self.plan, trial.config)
        cause = f"the cohort {cohort.name} failed {trial.num_failures} times, the last time with {last_error(trial)}"
        logger.warning(cause)
        for member in cohort.trials:
            self.journal.append(TrialFailed(cohort=cohort.name, trial=member.name, cause=cause))
        self.journal.append(CohortEnded(cohort=cohort.name, reason="failed"))


def last_error(trial: TuneTrial) -> str:
    """The line that says why a trial failed last, from the file that Tune appends to on this machine: the copy that
    TuneTrial.get_error reads may come later."""
    file = Path(trial.error_file or "")
    text = file.read_text() if file.is_file() else ""
    lines = [line for line in text.rpartition("Failure # ")[2].splitlines()[1:] if line.strip()]
    if not lines:
        return "an error that Ray did not tell; the engines' logs may"
    return lines[-1] if lines[0].startswith("ray::") else lines[0]  # a traceback, or what Ray says of a dead actor
