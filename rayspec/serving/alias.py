"""What an alias of the model registry means now."""

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rayspec.serving.champion import MODEL
from rayspec.serving.rollover import Postponed
from rayspec.tracking import UNREACHABLE, few_retries, is_refusal


def followed(source: str) -> tuple[str, str]:
    """(model, alias) of what --follow can follow. Raises ValueError for a source that cannot move."""
    model = MODEL.fullmatch(source)
    if model is None or model["alias"] is None:
        raise ValueError(f"--follow needs models:/NAME@ALIAS, whose alias can move, got {source!r}")
    return model["name"], model["alias"]


def pinned_source(source: str, client: MlflowClient) -> str:
    """The same without an alias, which may move while replicas start."""
    model = MODEL.fullmatch(source)
    if model is None or model["alias"] is None:
        return source
    try:
        version = client.get_model_version_by_alias(model["name"], model["alias"])
    except MlflowException:
        return source  # whoever looks for it says what is missing
    return f"models:/{version.name}/{version.version}"


class MlflowRegistry:
    def __init__(self, client: MlflowClient, model: str, alias: str) -> None:
        self._client, self._model, self._alias = client, model, alias

    def meant(self) -> str | None:
        try:
            with few_retries():  # it is asked again soon
                return str(self._client.get_model_version_by_alias(self._model, self._alias).version)
        except UNREACHABLE as error:
            if is_refusal(error):
                return None
            raise Postponed(f"MLflow does not answer ({type(error).__name__})") from error
