"""What an alias of the model registry means now."""

from contextlib import suppress

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rayspec.serving.champion import MODEL, RUN, version_of
from rayspec.serving.events import WATCH_TIMEOUT_S
from rayspec.serving.logs import log
from rayspec.serving.rollover import Postponed
from rayspec.tracking import UNREACHABLE, few_retries, is_refusal, said


def followed(source: str) -> tuple[str, str]:
    """(model, alias) of what --follow can follow. Raises ValueError for a source that cannot move."""
    model = MODEL.fullmatch(source)
    if model is None or model["alias"] is None:
        raise ValueError(f"--follow needs models:/NAME@ALIAS, whose alias can move, got {source!r}")
    return model["name"], model["alias"]


def pinned_source(source: str, client: MlflowClient) -> str:
    """The version that an alias or a run means now: others may come while replicas start."""
    model, run = MODEL.fullmatch(source), RUN.fullmatch(source)
    version = None
    with suppress(MlflowException):  # the caller, which looks for it, says what is missing
        if model is not None and model["alias"] is not None:
            version = client.get_model_version_by_alias(model["name"], model["alias"])
        elif run is not None:
            version = version_of(run["run"], client)
    return source if version is None else f"models:/{version.name}/{version.version}"


class MlflowRegistry:
    def __init__(self, client: MlflowClient, model: str, alias: str) -> None:
        self._client, self._model, self._alias = client, model, alias
        self._refused_for = ""  # why it was not told what the alias means; each reason is said once

    def meant(self) -> str | None:
        try:
            with few_retries(WATCH_TIMEOUT_S):  # it is asked again soon
                version = str(self._client.get_model_version_by_alias(self._model, self._alias).version)
        except UNREACHABLE as error:
            if not is_refusal(error):
                raise Postponed(f"MLflow does not answer ({type(error).__name__})") from error
            self._tell(said(error, self._client.tracking_uri))
            return None
        self._refused_for = ""
        return version

    def _tell(self, reason: str) -> None:
        if reason != self._refused_for:
            log.warning(
                "MLflow does not say what %s@%s means: %s; the version under traffic goes on, and no other takes its "
                "place until it does",
                *(self._model, self._alias, reason),
            )
        self._refused_for = reason
