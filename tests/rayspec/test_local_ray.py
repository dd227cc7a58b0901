"""The cluster that a sweep starts on this machine."""

import gc
import os
import socket
import weakref
from pathlib import Path

import pytest
import ray
from servers import listening

from rayspec.farm.actor import _shut_down, cluster
from rayspec.serving.access import Access
from rayspec.serving.version import Serving


def test_a_local_cluster_listens_on_the_loopback_address_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    @ray.remote
    def work() -> str:
        return ray.util.get_node_ip_address()

    with cluster(None):  # before another one of the same process
        pass
    with cluster(None):
        assert ray.get(work.remote()) == "127.0.0.1"
        found = listening(os.getpid())
        check_a_port_that_is_taken()
    assert {"gcs_server", "raylet"} <= {program for program, _ in found}
    assert [program for program, is_local in found if not is_local] == []
    assert list(tmp_path.iterdir()) == [], "no token that every cluster of the user would then ask for"


def check_a_port_that_is_taken() -> None:
    """Ray Serve would listen beside another one of the same port, and clients would get answers of either."""
    from rayspec.serving.deployed import _listen  # imports Ray Serve

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        serving = Serving(
            host="127.0.0.1", port=port, access=Access(), target=None, force=False, follows_policy=True, more=(),
            tracking_uri=None,
        )  # fmt: skip
        with pytest.raises(ValueError, match=f"nothing can listen on --host 127.0.0.1 --port {port}"):
            _listen(serving)


def test_nothing_is_collected_while_ray_shuts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends the process, from C++, where a thread frees a reference to one of its objects meanwhile."""

    class Cycle:
        def __init__(self) -> None:
            self.me = self

    freed: list[str] = []
    weakref.finalize(Cycle(), freed.append, "before")

    def shutdown() -> None:
        assert freed == ["before"]
        assert not gc.isenabled()

    monkeypatch.setattr(ray, "shutdown", shutdown)
    _shut_down()
    assert gc.isenabled()


def test_a_machine_that_is_too_busy_for_ray_gives_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", too_late)
    with pytest.raises(TimeoutError, match=r"Ray did not start .* run the same command again"), cluster(None):
        pass
    monkeypatch.setattr(ray, "init", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError), cluster(None):
        pass
