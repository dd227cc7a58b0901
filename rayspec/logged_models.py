"""Drafters as MLflow's logged models, by explicit ids: a sweep has one for each drafter that it measures.

As with runs, everything can be written twice: a model is found again by its source run and its tag `head`.
"""

import json
import re
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

MODEL_TYPE = "drafter"
TAG_VALUE_LIMIT = 5000
RESUME_TAG = "resume"  # the command that goes on with what was cut off
MODEL_ID_TAG = "model_id"  # tag of a registered version
LABEL_TAG = "head"  # the whole name, as runs have it
_NOT_ALLOWED = re.compile(r"[/:.%\"']")  # in a model's name


class Model:
    """One logged model. It is PENDING until `finish` or `fail`; both may be called again without effect."""

    def __init__(self, client: MlflowClient, found: LoggedModel) -> None:
        self.client = client
        self.model_id = found.model_id
        self._status = LoggedModelStatus(found.status)

    @property
    def is_open(self) -> bool:
        return self._status == LoggedModelStatus.PENDING

    @property
    def is_failed(self) -> bool:
        return self._status == LoggedModelStatus.FAILED

    def reopen(self) -> None:
        """Set it PENDING again, and forget why it had ended."""
        tags = self.client.get_logged_model(self.model_id).tags
        for tag in ("error", RESUME_TAG):
            if tag in tags:
                self.client.delete_logged_model_tag(self.model_id, tag)
        self._set(LoggedModelStatus.PENDING)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        if tags:
            self.client.set_logged_model_tags(self.model_id, {k: v[:TAG_VALUE_LIMIT] for k, v in tags.items()})

    def finish(self) -> None:
        if self.is_open:
            self._set(LoggedModelStatus.READY)

    def fail(self, cause: str) -> None:
        """End as FAILED, with the cause as the tag `error`."""
        if self.is_open:
            self.set_tags({"error": cause})
            self._set(LoggedModelStatus.FAILED)

    def cut_off(self, resume: str) -> None:
        """End as FAILED, with the command that goes on as the tag `resume`."""
        if self.is_open:
            self.set_tags({RESUME_TAG: resume})
            self._set(LoggedModelStatus.FAILED)

    def _set(self, status: LoggedModelStatus) -> None:
        self.client.finalize_logged_model(self.model_id, status)
        self._status = status


def find_models(client: MlflowClient, experiment_id: str, source_run_id: str) -> dict[str, LoggedModel]:
    """The logged models that a run has made and nobody has deleted, by their label."""
    found: list[LoggedModel] = []
    token: str | None = None
    while token is None or token:
        page = client.search_logged_models(
            [experiment_id], f"source_run_id = '{source_run_id}'", max_results=100, page_token=token
        )
        found += page
        token = page.token or ""
    return {m.tags[LABEL_TAG]: m for m in found if LABEL_TAG in m.tags}


def create_model(
    client: MlflowClient,
    experiment_id: str,
    source_run_id: str,
    label: str,
    tags: Mapping[str, str],
    params: Mapping[str, object],
) -> LoggedModel:
    return client.create_logged_model(
        experiment_id,
        name=_NOT_ALLOWED.sub("_", label),
        source_run_id=source_run_id,
        tags={k: v[:TAG_VALUE_LIMIT] for k, v in tags.items()} | {LABEL_TAG: label},
        params={k: str(v) for k, v in params.items()},
        model_type=MODEL_TYPE,
    )


def add_version(client: MlflowClient, model_id: str, name: str, version: str) -> None:
    """Note at a logged model that it is registered under a name, where MLflow's own pages look for it."""
    noted = json.loads(client.get_logged_model(model_id).tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
    noted.append({"name": name, "version": version})
    client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(noted)})
