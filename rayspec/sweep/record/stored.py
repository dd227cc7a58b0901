"""A sweep read back from MLflow: the counterpart of `rayspec.driver.publish`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from rayspec.farm.load import Traffic
from rayspec.records import CanaryAnswer
from rayspec.sweep.candidate import Candidate
from rayspec.sweep.plan.trials import PLAIN, Trial
from rayspec.sweep.record.metric_names import metric_name
from rayspec.sweep.record.results import TrialResult
from rayspec.tracking import TrackingError, redacted
from sglang_ext.json_text import parse_json
from sglang_ext.settings import Settings, build

PAGE = 1000  # runs a call
CANARY = "canary.json"  # artifact of a trial: what it answered to the canary prompts


@dataclass(frozen=True, kw_only=True)
class _CanaryAnswers(Settings):
    answers: tuple[CanaryAnswer, ...]


@dataclass(frozen=True, kw_only=True)
class StoredSweep:
    """A parent run with its trials in the order in which they were planned."""

    client: MlflowClient
    parent: Run
    results: tuple[TrialResult, ...]
    run_ids: Mapping[Trial, str]

    @property
    def run_id(self) -> str:
        return self.parent.info.run_id

    @property
    def name(self) -> str:
        return self.parent.info.run_name

    @property
    def tags(self) -> Mapping[str, str]:
        return self.parent.data.tags

    @property
    def params(self) -> Mapping[str, str]:
        """The sweep's settings by their YAML path."""
        return {k.removeprefix("sweep."): v for k, v in self.parent.data.params.items() if k.startswith("sweep.")}

    def temperature(self, trial: Trial) -> float:
        own = trial.traffic.temperature
        return float(self.params["temperature"]) if own is None else own

    @property
    def datasets(self) -> list[Any]:
        """What was measured on, as MLflow datasets."""
        return [entry.dataset for entry in self.parent.inputs.dataset_inputs]

    def requests(self, trial: Trial) -> list[dict[str, Any]]:
        """The requests of a trial, as publish wrote them."""
        text = self._artifact(self.run_ids[trial], "requests.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    def canary(self, trial: Trial) -> tuple[CanaryAnswer, ...]:
        """What a trial answered to the canary prompts; empty where it was not asked. Raises ValueError for a file that
        somebody has changed."""
        run_id = self.run_ids[trial]
        if not any(file.path == CANARY for file in self.client.list_artifacts(run_id)):
            return ()
        stored = {"answers": parse_json(self._artifact(run_id, CANARY).encode())}
        return build(_CanaryAnswers, stored, f"{CANARY} of run {run_id}").answers

    def config_yaml(self) -> str:
        return self._artifact(self.run_id, "config.yaml")

    def _artifact(self, run_id: str, path: str) -> str:
        with TemporaryDirectory() as folder:
            try:
                return Path(self.client.download_artifacts(run_id, path, folder)).read_text()
            except (MlflowException, OSError) as error:
                raise TrackingError(f"run {run_id} has no readable artifact {path}: {error}") from error


def find_sweep(client: MlflowClient, wanted: str | None = None) -> StoredSweep:
    """The sweep with this parent run id or run name; by name, and without one, the newest that has ended.

    Raises TrackingError, naming the sweeps that are there.
    """
    parents = _parents(client)
    if wanted is None:
        matching = [r for r in parents if r.info.status != "RUNNING"]
    else:
        matching = [r for r in parents if wanted in (r.info.run_id, r.info.run_name)]
    if not matching:
        known = ", ".join(f"{r.info.run_name} ({r.info.run_id})" for r in parents[:10]) or "none"
        what = "a sweep that has ended" if wanted is None else f"a sweep whose run id or name is {wanted!r}"
        raise TrackingError(
            f"no run in {redacted(client.tracking_uri)} is {what}; sweeps there, newest first: {known}. Set "
            "MLFLOW_TRACKING_URI or RAYSPEC_HOME for another store; rayspec sweep makes a sweep"
        )
    return _read(client, matching[0])


def _parents(client: MlflowClient) -> list[Run]:
    """All sweeps, newest first."""
    experiments = [e.experiment_id for e in client.search_experiments()]
    return _search(client, experiments, "tags.kind = 'sweep'", "start_time DESC")


def _search(client: MlflowClient, experiments: Sequence[str], condition: str, order: str) -> list[Run]:
    runs: list[Run] = []
    token: str | None = None
    while True:
        page = client.search_runs(
            list(experiments), condition, max_results=PAGE, order_by=[f"attributes.{order}"], page_token=token
        )
        runs += page
        token = page.token
        if not token:
            return runs


def _read(client: MlflowClient, parent: Run) -> StoredSweep:
    condition = f"tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent.info.run_id}'"
    children = _search(client, [parent.info.experiment_id], condition, "start_time ASC")
    if not any("sweep.baseline" in child.data.params for child in children):
        raise TrackingError(f"sweep {parent.info.run_name} ({parent.info.run_id}) holds no trial that can be read")
    results = [_result(child) for child in children]
    order = {d: i for i, d in enumerate([PLAIN, *_names(parent.data.params.get("sweep.drafters", ""))])}
    results.sort(key=lambda r: (r.trial.traffic, r.trial.draft_steps, order.get(r.trial.label, len(order)), *_made(r)))
    run_ids = {_trial(child): child.info.run_id for child in children}
    return StoredSweep(client=client, parent=parent, results=tuple(results), run_ids=run_ids)


def _made(result: TrialResult) -> tuple[str, list[float]]:
    """Where a head belongs that the sweep has made: beside those of its series, by its numbers."""
    candidate = result.trial.candidate
    return (candidate.series, list(candidate.head.numbers.values())) if candidate else ("", [])


def _names(drafters: str) -> list[str]:
    return [Path(name).name for name in drafters.split(", ")]


def _result(child: Run) -> TrialResult:
    trial = _trial(child)
    if child.info.status != "FINISHED":
        error = child.data.tags.get("error") or f"the run is {child.info.status}"
        return TrialResult(trial=trial, baseline=child.data.params["sweep.baseline"], error=error)
    names = {key: metric_name(key) for key in child.data.metrics}
    metrics = {name: child.data.metrics[key] for key, name in names.items() if name is not None}
    return TrialResult(trial=trial, metrics=metrics, baseline=child.data.params["sweep.baseline"])


def _trial(child: Run) -> Trial:
    params, label = child.data.params, child.data.tags["head"]
    is_swept = ", " in params.get("sweep.temperature", "")
    traffic = Traffic(
        temperature=float(params["temperature"]) if is_swept else None,
        concurrency=int(params["concurrency"]),
        request_rate=float(params["request_rate"]),
        trace_speed=float(params.get("trace_speed", 0)),
    )
    return Trial(candidate=None if label == PLAIN else Candidate.from_params(label, params), traffic=traffic)
