"""What a sweep notes of answers to the canary prompts, and what a served version answers."""

from collections.abc import Sequence
from typing import Any

from mlflow import MlflowClient

from rayspec.records import CanaryAnswer
from rayspec.serving.access import Access
from rayspec.serving.canary import Answer
from rayspec.serving.canary_server import answers_of_a_canary
from rayspec.serving.champion import Champion, find_champion
from rayspec.serving.process import LOOPBACK
from rayspec.serving.version import Serving
from rayspec.workloads.canary import CANARY_PROMPTS


def as_measured(answered: Sequence[Answer]) -> tuple[CanaryAnswer, ...]:
    return tuple(CanaryAnswer.of(prompt, answer) for prompt, answer in zip(CANARY_PROMPTS, answered, strict=True))


def served_answers(source: str, client: MlflowClient | None = None) -> tuple[Champion, list[Answer]]:
    """A version, of MLflow or a folder, and what a server of it answers."""
    options: dict[str, Any] = {"target": None, "force": True}
    champion = find_champion(source, client, **options)
    uri = None if client is None else client.tracking_uri
    own = {"host": LOOPBACK, "port": 0, "access": Access(), "follows_policy": False, "more": (), "tracking_uri": uri}
    return champion, answers_of_a_canary(Serving(**own, **options).version(champion, source))
