"""Runs a sweep: the only part that knows journal, cohorts, scores, tracking and report.

The driver runs Tune and follows the journal; it holds nothing that the journal does not. So a sweep that was cut off
goes on by the same way on which it began.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from tqdm import tqdm

from rayspec.costs import read_costs
from rayspec.disk import is_full
from rayspec.driver.follow import Follower
from rayspec.driver.publish import Publisher
from rayspec.farm.actor import cluster, node_gpus
from rayspec.farm.lifeline import NodeLost
from rayspec.farm.runtime import EngineFailed
from rayspec.home import artifact_uri, tracking_uri
from rayspec.logged_models import Model, find_models
from rayspec.provenance import provenance
from rayspec.report.table import summary
from rayspec.sweep.measure.search import run_cohorts
from rayspec.sweep.measure.trainable import CohortTrainable, JournalFailed, RemoteJournal, journal_actor
from rayspec.sweep.plan.placement import place
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.record.events import TrialFailed
from rayspec.sweep.record.folder import TARGET_SHA256, SweepFolder, target_files_sha256
from rayspec.sweep.record.measured import read_state
from rayspec.sweep.record.results import TrialResult, score
from rayspec.tracking import UNREACHABLE, Run, Tracker, few_retries, is_outage, persistently, redacted
from sglang_ext.fingerprints import combined_sha256

logger = logging.getLogger(__name__)
PATIENCE_S = 300.0  # for an MLflow server that is gone at the end


class SweepStopped(RuntimeError):
    """Something that is no trial's fault; the message says what, and how to go on."""


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    results: Sequence[TrialResult]
    summary: str
    parent_run_id: str
    tracking_uri: str

    @property
    def failed(self) -> list[TrialResult]:
        return [r for r in self.results if r.error]


def resume_command(folder: SweepFolder) -> str:
    return f"rayspec sweep --resume {folder.id}"


def run_sweep(
    prepared: Prepared, folder: SweepFolder, trainable: type[CohortTrainable] = CohortTrainable
) -> SweepOutcome:
    """Measure every trial that the folder's journal lacks, and record all. `trainable` runs a cohort.

    Raises what stops the whole sweep (EngineFailed where no trial succeeded, SweepStopped where it can go on later),
    after its runs were ended as FAILED.
    """
    config = prepared.config
    with folder.locked(), few_retries():
        try:
            tracker = Tracker(tracking_uri(), config.experiment, artifact_uri())
            close_cut_off(tracker, folder.path.parent)
            tags = {"command": folder.manifest()["command"], **provenance(), "kind": "sweep", "sweep.id": folder.id}
            found = tracker.search(f"tags.`sweep.id` = '{folder.id}' and tags.kind = 'sweep'")
            run_id = found[0].info.run_id if found else None
            with tracker.parent(config.name, tags, run_id=run_id, resume=resume_command(folder)) as parent:
                folder.set_run_id(parent.run_id)
                outcome = _run(prepared, folder, tracker, parent, tags, trainable)
        except (*UNREACHABLE, NodeLost, JournalFailed) as error:
            raise SweepStopped(
                f"{_problem(error)}; what was measured is in {folder.journal}; when that is mended: "
                f"{resume_command(folder)}"
            ) from error
        folder.set_ended()
    if all(r.error for r in outcome.results):
        raise EngineFailed(f"no trial succeeded:\n{outcome.summary}")
    return outcome


def _problem(error: BaseException) -> str:
    if isinstance(error, NodeLost | JournalFailed) or (isinstance(error, OSError) and not is_outage(error)):
        return str(error)
    problem = "is gone" if is_outage(error) and not is_full(error) else f"refused ({error})"
    return f"MLflow at {redacted(tracking_uri())} {problem}"


def _run(
    prepared: Prepared,
    folder: SweepFolder,
    tracker: Tracker,
    parent: Run,
    tags: dict[str, str],
    trainable: type[CohortTrainable],
) -> SweepOutcome:
    config = prepared.config
    publisher = Publisher(tracker, parent, config, {**tags, "kind": "trial"})
    publisher.open(prepared.describe(), prepared.prompts, folder.drafter_tags())
    is_terminal = sys.stderr.isatty()
    with tqdm(total=prepared.plan.num_blocks, unit="block", mininterval=0.2 if is_terminal else 10) as progress:
        follower = Follower(folder, prepared.plan, publisher, progress)
        follower.start()
        try:
            _measure(prepared, folder, trainable)
        finally:
            follower.stop()
        state = follower.state
        follower.finish(PATIENCE_S)
    measured = {t.label: t.candidate.path for t in state.blocks if t.candidate and t not in state.errors}
    dtype = state.machine.get("engine.dtype") or config.engine.dtype  # older journals have no resolved one
    costs = read_costs(prepared.target, measured, dtype, config.engine.extra)
    blocks = {t: sorted(b, key=lambda block: block.index) for t, b in state.blocks.items()}
    results = score(config, blocks, state.errors, state.head_latency_s, costs)
    text = summary(results)

    def close() -> None:
        # those of a Hugging Face name are known now that engines have fetched it
        files = target_files_sha256(prepared.target)
        parent.set_tags({TARGET_SHA256: combined_sha256(files)} if files else {})
        publisher.logs(folder.logs)
        publisher.close(results, blocks, text, state.machine, follower.last_time_s)
        parent.fail(f"no trial succeeded:\n{text}") if all(r.error for r in results) else parent.finish()

    persistently(close, PATIENCE_S)
    return SweepOutcome(results=results, summary=text, parent_run_id=parent.run_id, tracking_uri=tracker.uri)


def _measure(prepared: Prepared, folder: SweepFolder, trainable: type[CohortTrainable]) -> None:
    """Have the cohorts measured that the journal does not hold."""
    plan, config = prepared.plan, prepared.config
    state = read_state(plan, folder.journal)
    with cluster(config.ray.address, min_cpus=2 * config.ray.num_cpus):
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive < config.engine.nodes:  # Tune would wait for them without a word
            raise ValueError(
                f"engine.nodes is {config.engine.nodes}, but the Ray cluster has {alive} node(s); lower it, or set "
                "ray.address or RAY_ADDRESS to a cluster with as many"
            )
        placement = place(config, node_gpus())
        actor = journal_actor(folder.journal)
        journal = RemoteJournal(actor)
        for trial in plan.trials:
            if trial.candidate is not None and trial.candidate.problem:
                journal.append(TrialFailed(trial=trial.name, cause=trial.candidate.problem))
        run_cohorts(prepared, placement, actor, state, folder, trainable)
        ray.kill(actor)


def close_cut_off(tracker: Tracker, folders: Path) -> None:
    """End the runs and logged models of sweeps of this home whose driver is gone, saying in a tag how to go on."""
    for found in tracker.search("tags.kind = 'sweep' and attributes.status = 'RUNNING'"):
        folder = SweepFolder(folders / found.data.tags.get("sweep.id", ""))
        if folder.path == folders or not folder.journal.parent.is_dir() or folder.is_running:
            continue
        for run in [found, *tracker.search(f"tags.`mlflow.parentRunId` = '{found.info.run_id}'")]:
            Run(tracker.client, run.info.run_id, run.info.status).cut_off(resume_command(folder))
        for model in find_models(tracker.client, tracker.experiment_id, found.info.run_id).values():
            Model(tracker.client, model).cut_off(resume_command(folder))
