"""The canary on a cluster: its server in a Ray actor with the resources of a replica."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rayspec.serving.canary import Answer
from rayspec.serving.canary_server import answers_of_a_canary
from rayspec.serving.rollover import Postponed
from rayspec.serving.scale import Scale
from rayspec.serving.version import ServedVersion

PLACE_TIMEOUT_S = 120.0  # for Ray to start an actor's process


class Canary:
    def place(self) -> None:
        """Answered once the actor has its place in the cluster."""

    def answers(self, version: ServedVersion) -> list[Answer]:
        return answers_of_a_canary(version)


def canary_on_ray(version: ServedVersion, scale: Scale) -> list[Answer]:
    """With the promoted draft length: the evidence is of that one, and a policy's tau depends on the load. Raises
    ValueError where the version does not serve, Postponed where there is no room for it."""
    actor: Any = ray.remote(**scale.actor_options, max_restarts=0)(Canary).remote()
    try:
        with _readable(version.name):
            ray.get(actor.place.remote(), timeout=PLACE_TIMEOUT_S)
            answers: list[Answer] = ray.get(actor.answers.remote(replace(version, follows_policy=False)))
            return answers
    finally:
        ray.kill(actor, no_restart=True)  # its server ends with it


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Ray's errors as what they mean for a version."""
    try:
        yield
    except GetTimeoutError as error:
        raise Postponed(
            f"there was no room for the canary of {what} within {PLACE_TIMEOUT_S:g} s; it needs the resources of one "
            "more replica"
        ) from error
    except RayActorError as error:
        raise ValueError(f"the canary's process of {what} has died: {first_line(error)}") from error
    except RayTaskError as error:
        raise ValueError(f"the canary of {what} did not serve: {error.cause or first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
