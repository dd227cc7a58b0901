"""Puts a synthetic sweep into an MLflow store through the same publisher as a real one, and its winner into the
registry. Figures are drawn where a test asks for them: they take longer than all else."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import mlflow.artifacts
import pytest
from canary_answers import as_measured
from mlflow import MlflowClient
from mlflow.tracking._tracking_service.utils import _artifact_repos_cache
from synthetic import SyntheticSweep
from versions import answers

from rayspec.driver.publish import Publisher
from rayspec.provenance import provenance
from rayspec.report.page import write_report
from rayspec.report.promote import Promotion, promote, winner
from rayspec.report.table import summary
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.folder import (
    DRAFTER_SHA256,
    TARGET_SHA256,
    WHOLE_SHA256,
    drafter_sha256,
    target_files_sha256,
    whole_drafter_sha256,
)
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from rayspec.tracking import Tracker
from rayspec.workloads import Conversation
from sglang_ext.fingerprints import combined_sha256

MEASURED_AT_S = 1.79e9
COMMAND = "rayspec sweep --config configs/sweep/demo.yaml"
CAUSE = "drafter /broken does not fit its config.json: missing fc.weight | <script>alert(1)</script>"


@contextmanager
def undrawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayspec.driver.publish.write_figures", lambda *_: [])
        patch.setattr("rayspec.report.page.sweep_figures", lambda *_: {})
        yield


def promoted(sweep: StoredSweep, folder: Path, model: str | None = None) -> Promotion:
    """The sweep's winner, with a report in `folder`."""
    with undrawn():
        write_report(sweep, folder)
    return promote(sweep, folder, winner(sweep.results), model)


def publish(tracker: Tracker, sweep: SyntheticSweep, run_id: str | None = None, *, draws: bool = False) -> str:
    """The parent's run id, `run_id` where it is published again. One trial of a broken drafter fails beside those that
    were measured."""
    with nullcontext() if draws else undrawn():
        return _publish(tracker, sweep, run_id)


def _publish(tracker: Tracker, sweep: SyntheticSweep, run_id: str | None) -> str:
    candidate = Candidate(label="broken", path="/broken", draft_steps=2, problem=CAUSE)
    broken = Trial(candidate=candidate, traffic=min(trial.traffic for trial in sweep.blocks))
    requests = [r for blocks in sweep.blocks.values() for b in blocks for r in b.requests]
    prompts = [
        Conversation(id=id_, category=category, turns=(f"prompt {id_}",))
        for id_, category in dict.fromkeys((r.prompt_id, r.category) for r in requests)
    ]
    tags = {"command": COMMAND, **provenance()}
    with tracker.parent(sweep.config.name, {**tags, "kind": "sweep"}, run_id=run_id) as parent:
        publisher = Publisher(tracker, parent, sweep.config, tags)
        candidates = [t.candidate for t in sweep.blocks if t.candidate]
        fingerprints = {
            c.label: {DRAFTER_SHA256: drafter_sha256(c), WHOLE_SHA256: whole_drafter_sha256(c)} for c in candidates
        }
        publisher.open("the plan", prompts, fingerprints)
        publisher.failed(broken, CAUSE)
        for trial, blocks in sweep.blocks.items():
            for n in range(1, len(blocks) + 1):
                publisher.block(trial, blocks[:n], MEASURED_AT_S + n)
            if trial.candidate is not None:
                publisher.canary(trial, as_measured(answers(1.5)))
        results = [*sweep.results, TrialResult(trial=broken, baseline=sweep.config.baseline, error=CAUSE)]
        parent.set_tags({TARGET_SHA256: combined_sha256(target_files_sha256(sweep.config.target))})
        publisher.close(results, sweep.blocks, summary(results), {"engine.threads": "1"}, MEASURED_AT_S + 100)
    return parent.run_id


def copy_store(folder: Path, to: Path) -> None:
    """A folder of mlflow.db and all that it names, with the new folder in every path of the old one."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("mlflow.db*"), dirs_exist_ok=True)
    with closing(sqlite3.connect(folder / "mlflow.db")) as old, closing(sqlite3.connect(to / "mlflow.db")) as new:
        new.execute("PRAGMA synchronous=OFF")
        new.executescript("\n".join(old.iterdump()).replace(str(folder), str(to)))
    _artifact_repos_cache.clear()  # where a run's files lie, by its id alone


def download_champion(client: MlflowClient, model: str, folder: Path) -> Path:
    """The champion's drafter folder, downloaded into `folder` as anybody who serves it would."""
    version = client.get_model_version_by_alias(model, "champion")
    source = client.get_model_version_download_uri(model, version.version)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(mlflow.artifacts.download_artifacts(source, dst_path=str(folder), tracking_uri=client.tracking_uri))
