"""What a failed start leaves on the cluster, without Ray."""

import errno
import inspect
import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve._private import deployment_state
from ray.serve._private import replica as replica_of_ray
from ray.serve.schema import ApplicationStatus

from rayspec.serving import deployed as module
from rayspec.serving import replica
from rayspec.serving.deployed import INGRESS, NO_ROOM, deployed, put_in
from rayspec.serving.ingress import SERVERS
from rayspec.serving.rollover import Postponed
from rayspec.serving.scale import Scale

SERVING: Any = SimpleNamespace(
    log_format="text", tries_first=False, scale=Scale(drain_s=100.0), version=lambda champion, source: source
)
CHAMPION: Any = SimpleNamespace(name="a")
SOURCE = "models:/m/1"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str], Exception], list[str]]:
    """Starts with these applications on the cluster, and a `put_in` that raises. Returns what was deleted."""

    def started(found: set[str], error: Exception) -> list[str]:
        deleted: list[str] = []

        def fail(*_: object) -> None:
            raise error

        nothing = {"_only_board": lambda: None, "_left": lambda source: source, "_listen": lambda serving: None}
        for name, do in {
            **nothing,
            "_shut_down": lambda: None,
            "_delete": lambda name, drain_s: deleted.append(name),
            "put_in": fail,
        }.items():
            monkeypatch.setattr(module, name, do)
        monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=found))
        expected = ValueError if isinstance(error, Postponed) else type(error)
        with (
            pytest.raises(expected, match=re.escape(str(error).splitlines()[0])),
            deployed(CHAMPION, SOURCE, SERVING),
        ):
            pytest.fail("it did not start")
        return deleted

    return started


@pytest.mark.parametrize(
    "error", [ValueError("they did not start"), Postponed("no room"), RayActorError(), TimeoutError("Ray")]
)
def test_replicas_that_were_there_stay_whatever_a_take_over_meets(
    error: Exception, start: Callable[[set[str], Exception], list[str]]
) -> None:
    assert start({SERVERS, INGRESS}, error) == []
    assert start(set(), error) == [SERVERS], "nobody had these but the command itself"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("1 replicas that have taken more than 30s to be scheduled. Resources required", Postponed),
        ("1 replicas that have taken more than 30s to initialize.", ValueError),
        ("", ValueError),
    ],
)
def test_replicas_that_ray_has_no_room_for_say_nothing_of_their_version(
    message: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    version: Any = SimpleNamespace(name="a", start_timeout_s=0.0)
    scale: Any = None
    servers = {"Server": SimpleNamespace(message=message)}
    at = {SERVERS: SimpleNamespace(status=ApplicationStatus.DEPLOYING, deployments=servers, message="")}
    monkeypatch.setattr(module, "deploy", lambda *_: None)
    told = [{}, at]  # just after it was asked for Ray may not list it
    monkeypatch.setattr(module, "STATUS_S", 0.01)
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications=told.pop(0) if told[1:] else at))
    version.start_timeout_s = 0.005
    with pytest.raises(error, match=r"were not up after 0\.005 s"):
        put_in(version, scale, None)


def test_a_replica_without_disk_says_nothing_of_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What Ray Serve tells of a replica that does not start is the traceback that is made here as Ray makes it."""
    version: Any = SimpleNamespace(name="a", start_timeout_s=9.0, tries_first=False)

    def start_server(version: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "champions"))

    monkeypatch.setattr(replica, "start_server", start_server)
    with pytest.raises(Postponed) as caught:
        replica.Replica(version)
    told = "".join(traceback.format_exception(caught.value))  # as `traceback.format_exc` in Ray Serve's replica
    servers = {"Server": SimpleNamespace(message=f"The deployment failed to start 3 times in a row. Error:\n{told}")}
    failed = SimpleNamespace(status=ApplicationStatus.DEPLOY_FAILED, deployments=servers, message="")
    monkeypatch.setattr(module, "deploy", lambda *_: None)
    monkeypatch.setattr(module.serve, "status", lambda: SimpleNamespace(applications={SERVERS: failed}))
    scale: Any = None
    with pytest.raises(
        Postponed, match=rf"did not start: \[Errno 28\] No space left on device: '{tmp_path}/champions'$"
    ):
        put_in(version, scale, None)
    servers["Server"].message = "Error:\nTraceback\nValueError: what was checked said Postponed: never"
    with pytest.raises(ValueError, match=r"never$"):
        put_in(version, scale, None)


def test_rays_words_are_those_of_the_pinned_version() -> None:
    assert "raise RuntimeError(traceback.format_exc()) from None" in inspect.getsource(replica_of_ray)
    assert f"{{SLOW_STARTUP_WARNING_S}}s {NO_ROOM}. " in inspect.getsource(deployment_state)


@pytest.mark.parametrize(("ends_at", "warns"), [(99.0, False), (1e9, True)])
def test_the_end_waits_as_long_as_answers_may_take(
    ends_at: float, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray Serve's own call gives up after a minute, and what runs would be cut off."""
    now, asked = [0.0], []

    def delete(name: str, _blocking: bool) -> None:
        asked.append((name, _blocking))

    def status() -> SimpleNamespace:
        return SimpleNamespace(applications={SERVERS: None} if now[0] < ends_at else {})

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(module, "serve", SimpleNamespace(delete=delete, status=status))
    module._delete(SERVERS, drain_s=100.0)
    assert asked == [(SERVERS, False)]
    assert now[0] == pytest.approx(100 + module.GONE_TIMEOUT_S + 1 if warns else 99, abs=1.5)
    assert ("has not ended within 130 s" in caplog.text) == warns
