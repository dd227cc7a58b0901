"""A champion on a cluster of others: the command that was killed, the same command again, and what it does not take."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from fixture_models import DRAFTERS, prompt_texts
from mlflow import MlflowClient
from rollover_world import ALIAS, MODEL, make_random, point_at, register, streaming, tags, wait_for
from servers import START_TIMEOUT_S, two_ray_nodes
from test_serve_rollover import TOKENS, is_healthy, plain_answers, served, servers

from rayspec.serving.process import free_port


def refused(environment: dict[str, str], *words: str) -> str:
    """What a `rayspec serve` says that ends at once."""
    command = [sys.executable, "-m", "rayspec.cli", "serve", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def server_pids() -> set[int]:
    """SGLang's, of the two nodes that this process has started."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        words = child.cmdline() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE else []
        if "sglang.launch_server" in words and words[0] != "sh":
            found.add(child.pid)
    return found


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("options", [[], ["--replicas", "1"]], ids=["one_machine", "ray"])
def test_a_random_head_takes_no_traffic_from_the_first_start(options: list[str], tmp_path: Path) -> None:
    """Its files are whole, and its evidence is made up."""
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    bad = register(store, tmp_path / "bad", DRAFTERS["full"], tau=3.0, damage=make_random)
    environment = {**os.environ, "RAYSPEC_HOME": str(tmp_path / "home")}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    said = refused(environment, f"models:/{MODEL}/{bad}", *options, "--port", str(free_port()))
    assert "takes no traffic: tau on the canary prompts is 1." in said
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert left == []


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_command_that_ends_during_its_canary_leaves_nothing(
    number: signal.Signals, status: int, tmp_path: Path
) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    point_at(store, register(store, tmp_path / "first", DRAFTERS["full"], tau=3.0))
    port, log = free_port(), tmp_path / "serve.log"
    with served(tmp_path, port) as process:
        wait_for(lambda: "canary prompts are answered" in log.read_text(), 120, process, log)
        wait_for(lambda: len(servers(process)) == 1, 120, process, log)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        process.wait(120)
        assert process.returncode == status
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []


@pytest.mark.slow
@pytest.mark.engine
def test_the_same_command_takes_over_what_a_killed_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    point_at(store, register(store, tmp_path / "first", DRAFTERS["full"], tau=3.0))
    prompts = prompt_texts(4)
    expected = plain_answers(prompts, tmp_path)
    port, log = free_port(), tmp_path / "serve.log"
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    with two_ray_nodes() as (variables, _):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        environment = dict(os.environ)
        source = f"models:/{MODEL}@{ALIAS}"
        with served(tmp_path, port, "--replicas", "1") as first:
            wait_for(lambda: is_healthy(port), START_TIMEOUT_S, first, log)
            wait_for(lambda: "serving" in log.read_text(), 60, first, log)
            assert "another rayspec serve runs on this cluster" in refused(environment, source, "--replicas", "1")
            first.send_signal(signal.SIGKILL)
            first.wait()
        (before,) = server_pids()
        with ExitStack() as clients:
            asking = streaming(f"http://127.0.0.1:{port}", prompts, expected, clients=2, max_tokens=TOKENS)
            outcomes = clients.enter_context(asking)
            folder = next((tmp_path / "home" / "champions").iterdir())
            asked = [str(folder), "--replicas", "1", "--port", str(port)]
            assert f"has left models:/{MODEL}/1 under traffic" in refused(environment, *asked)
            asked = [source, "--replicas", "1", "--port", str(free_port())]
            assert f"Ray Serve listens on 127.0.0.1:{port} and cannot be moved" in refused(environment, *asked)
            bad = register(store, tmp_path / "bad", DRAFTERS["full"], tau=3.0, damage=make_random)
            asked = [f"models:/{MODEL}/{bad}", "--replicas", "1", "--port", str(port)]
            assert "takes no traffic: tau on the canary prompts is 1." in refused(environment, *asked)
            assert server_pids() == {before}, "what is refused ends nothing"
            point_at(store, bad)
            follow = ["--follow", "--poll-seconds", "2"]
            with served(tmp_path, port, "--replicas", "1", *follow, "--log-format", "json") as second:
                wait_for(lambda: _told(log, "serving"), START_TIMEOUT_S, second, log)
                wait_for(lambda: len(server_pids() - {before}) == 1 and before not in server_pids(), 120, second, log)
                done = outcomes.completed
                wait_for(lambda: outcomes.completed > done + 4, 120, second, log)
                assert _told(log, "takes over the applications")
                wait_for(lambda: "rollover" in tags(store, bad), START_TIMEOUT_S, second, log)
                wait_for(lambda: tags(store, bad)["rollover"] != "found", START_TIMEOUT_S, second, log)
                assert tags(store, bad)["rollover"] == "refused", "it takes no traffic, although the alias means it"
                second_log = log.read_text()
                clients.close()
                second.send_signal(signal.SIGTERM)
                second.wait(120)
        wait_for(lambda: server_pids() == set(), 120)
    assert outcomes.bad == []
    assert outcomes.completed > 8
    assert [line for line in second_log.splitlines() if "INFO " in line] == [], "no line of text among the objects"


def _told(log: Path, beginning: str) -> bool:
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return any(line["message"].startswith(beginning) for line in lines)
