"""As many replicas as the load needs: a second under load, one again when that is over, both anew in a roll-over; and
what is before them, when it dies."""

import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from fixture_models import DRAFTERS, prompt_texts
from mlflow import MlflowClient
from rollover_world import ask, point_at, register, streaming, tags, wait_for
from servers import START_TIMEOUT_S
from test_serve_rollover import TOKENS, is_healthy, plain_answers, served, servers

from rayspec.serving.process import LOOPBACK, free_port

OPTIONS = ["--min-replicas", "1", "--max-replicas", "2", "--requests-each", "2", "--scale-down-seconds", "10"]


@pytest.mark.slow
@pytest.mark.engine
def test_replicas_come_and_go_with_the_load_and_no_request_fails(tmp_path: Path) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    point_at(store, register(store, tmp_path / "first", DRAFTERS["full"], tau=3.0))
    prompts = prompt_texts(6)
    expected = plain_answers(prompts, tmp_path)
    port, log = free_port(), tmp_path / "serve.log"
    with served(tmp_path, port, *OPTIONS) as process:
        wait_for(lambda: is_healthy(port), START_TIMEOUT_S, process, log)
        assert len(servers(process)) == 1
        ready = tmp_path / "home" / "serving"
        before = _ready(ready)  # the canary's, and the first
        address, seen = f"http://{LOOPBACK}:{port}", [("1 client", time.monotonic())]
        with streaming(address, prompts, expected, clients=1, max_tokens=TOKENS) as steady:
            with streaming(address, prompts, expected, clients=6, max_tokens=TOKENS) as busy:
                wait_for(lambda: len(servers(process)) == 2, START_TIMEOUT_S, process, log)
                seen.append(("a second server starts", time.monotonic()))
                wait_for(lambda: _ready(ready) > before, START_TIMEOUT_S, process, log)
                seen.append(("it is ready", time.monotonic()))
                done = busy.completed
                wait_for(lambda: busy.completed >= done + 12, START_TIMEOUT_S, process, log)
            seen.append(("1 client again", time.monotonic()))
            wait_for(lambda: len(servers(process)) == 1, START_TIMEOUT_S, process, log)
            seen.append(("one server again", time.monotonic()))
            done = steady.completed
            wait_for(lambda: steady.completed >= done + 3, START_TIMEOUT_S, process, log)
        for what, at in seen:
            print(f"{at - seen[0][1]:6.0f} s  {what}")
        print(f"{steady.completed + busy.completed} requests: {steady.retriable + busy.retriable} had to be sent again")
        assert steady.bad + busy.bad == []
        assert steady.retriable + busy.retriable == [], "neither a start nor an end of a replica is seen by a client"


@pytest.mark.slow
@pytest.mark.engine
def test_a_roll_over_under_load_keeps_as_many_replicas_as_there_are(tmp_path: Path) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    first, second = (register(store, tmp_path / name, DRAFTERS["full"], tau=3.0) for name in ("first", "second"))
    point_at(store, first)
    prompts = prompt_texts(6)
    expected = plain_answers(prompts, tmp_path)
    port, log, ready = free_port(), tmp_path / "serve.log", tmp_path / "home" / "serving"
    options = [*OPTIONS, "--follow", "--poll-seconds", "2", "--watch-seconds", "0"]
    with served(tmp_path, port, *options) as process:
        wait_for(lambda: is_healthy(port), START_TIMEOUT_S, process, log)
        address = f"http://{LOOPBACK}:{port}"
        with streaming(address, prompts, expected, clients=6, max_tokens=TOKENS) as busy:
            before = _ready(ready)
            wait_for(lambda: _ready(ready) > before, START_TIMEOUT_S, process, log)
            point_at(store, second)
            wait_for(lambda: tags(store, second).get("rollover") == "canary_passed", START_TIMEOUT_S, process, log)
            old, ready_before = {p.pid for p in servers(process)}, _ready(ready)
            seen = []

            def is_over() -> bool:
                new = _ready(ready) - ready_before  # before the old ones are looked at, which may end meanwhile
                seen.append((new, len(old & {p.pid for p in servers(process)})))
                return tags(store, second).get("rollover") in ("kept", "refused")

            wait_for(is_over, START_TIMEOUT_S, process, log)
            done = busy.completed
            wait_for(lambda: busy.completed >= done + 12, START_TIMEOUT_S, process, log)
        assert tags(store, second)["rollover"] == "kept", log.read_text()[-4000:]
        assert len(old) == 2
        assert all(still == 2 for new, still in seen if new < 2), "old ones stay until as many new ones are up"
        assert (busy.bad, busy.retriable) == ([], [])


@pytest.mark.slow
@pytest.mark.engine
def test_an_ingress_or_a_proxy_that_dies_comes_back(tmp_path: Path) -> None:
    """What runs through it breaks off; the replicas go on."""
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    point_at(store, register(store, tmp_path / "first", DRAFTERS["full"], tau=3.0))
    (prompt,) = prompt_texts(1)
    port, log = free_port(), tmp_path / "serve.log"
    with served(tmp_path, port, "--replicas", "1", "--no-canary") as process, httpx.Client(timeout=120) as client:
        wait_for(lambda: is_healthy(port), START_TIMEOUT_S, process, log)
        answer, _ = ask(client, f"http://{LOOPBACK}:{port}", prompt, TOKENS)
        (server,) = servers(process)
        for actor in ("Ingress", "Proxy"):
            (victim,) = (p for p in psutil.Process(process.pid).children(recursive=True) if _is(p, actor))
            begin = time.monotonic()
            victim.kill()
            wait_for(lambda p=victim: not p.is_running(), 60, process, log)
            wait_for(lambda: is_healthy(port), 120, process, log)
            print(f"{actor}: healthy again after {time.monotonic() - begin:.0f} s")
            assert ask(client, f"http://{LOOPBACK}:{port}", prompt, TOKENS) == (answer, None)
        assert [p.pid for p in servers(process)] == [server.pid]


def _is(process: psutil.Process, actor: str) -> bool:
    with suppress(psutil.Error):
        return actor in process.name() or any("ray::" in word and actor in word for word in process.cmdline()[:1])
    return False


def _ready(folder: Path) -> int:
    """Servers that have answered /health, as their logs say."""
    return sum("fired up and ready" in file.read_text(errors="replace") for file in folder.glob("*.log"))
