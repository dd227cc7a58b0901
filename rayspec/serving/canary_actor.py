"""The canary on a cluster: its server in a Ray actor with the resources of a replica."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rayspec.disk import is_full
from rayspec.messages import first_line
from rayspec.serving.canary import Answer
from rayspec.serving.canary_server import answers_of_a_canary
from rayspec.serving.process import ServerTakenAway
from rayspec.serving.rollover import Postponed
from rayspec.serving.scale import Scale
from rayspec.serving.version import ServedVersion
from rayspec.tracking import ArtifactsAway, TrackingError, is_outage

PLACE_TIMEOUT_S = 120.0  # for Ray to start an actor's process, where nothing has to come first


@contextmanager
def outages_postpone() -> Iterator[None]:
    """A store that is away, a disk that is full, a server that was killed or whose port was taken, as Postponed: it
    says nothing of the version."""
    try:
        yield
    except ServerTakenAway as error:
        raise Postponed(first_line(error)) from error
    except ArtifactsAway as error:
        raise Postponed(str(error)) from error
    except TrackingError as error:
        cause = error.__cause__ or error.__context__  # whose message may hold a password, and so is not shown
        if cause is not None and is_outage(cause):
            raise Postponed(str(error)) from error
        raise
    except OSError as error:
        if is_full(error):
            raise Postponed(str(error)) from error
        raise


class Canary:
    def place(self) -> None:
        """Answered once the actor has its place in the cluster."""

    def answers(self, version: ServedVersion) -> list[Answer]:
        with outages_postpone():
            return answers_of_a_canary(version)


def canary_on_ray(version: ServedVersion, scale: Scale, place_timeout_s: float = PLACE_TIMEOUT_S) -> list[Answer]:
    """Answers with the promoted draft length: the evidence is of that one, and a policy's tau depends on the load.
    Raises ValueError where the version does not serve, Postponed where there is no room for it or Ray fails."""
    actor: Any = ray.remote(**scale.actor_options, max_restarts=0)(Canary).remote()
    try:
        with _readable(version.name, place_timeout_s):
            ray.get(actor.place.remote(), timeout=place_timeout_s)
            answers: list[Answer] = ray.get(actor.answers.remote(replace(version, follows_policy=False)))
            return answers
    finally:
        ray.kill(actor, no_restart=True)  # its server ends with it


@contextmanager
def _readable(what: str, place_timeout_s: float) -> Iterator[None]:
    """Ray's errors as what they mean for a version."""
    try:
        yield
    except GetTimeoutError as error:
        raise Postponed(
            f"there was no room for the canary of {what} within {place_timeout_s:g} s; it needs the resources of a "
            "replica, beside those that run"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, Postponed):
            raise Postponed(str(error.cause)) from error
        raise ValueError(f"the canary of {what} did not serve: {error.cause or first_line(error)}") from error
    except RayError as error:
        # SGLang's server is a process of its own, whose end is an error of the task, above. What ends the actor around
        # it says nothing of the version, whose files the driver has loaded before: its node died or was taken away, or
        # memory ran out, of which a canary needs as much as a replica: that is room, as above
        raise Postponed(f"the canary of {what} was lost ({type(error).__name__}: {_cause(error)})") from error


def _cause(error: RayError) -> str:
    """Of an actor's end Ray names the cause last, behind what the actor was."""
    lines = str(error).strip().splitlines()
    return lines[-1] if isinstance(error, RayActorError) and lines else first_line(error)
