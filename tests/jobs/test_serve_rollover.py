"""A champion on Ray Serve that follows its alias, under clients that stream all the time: a good version, a server
that is killed, bad versions of each kind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fixture_models import DRAFTERS, TARGET, prompt_texts
from mlflow import MlflowClient
from rollover_world import (
    ALIAS,
    FLAGS,
    MODEL,
    add_noise,
    ask,
    canary_of,
    cut_short,
    make_random,
    name_other_target,
    point_at,
    put_nan,
    register,
    streaming,
    tags,
    tamper,
    wait_for,
)
from servers import START_TIMEOUT_S

from rayspec.serving.access import Access
from rayspec.serving.events import FILE
from rayspec.serving.figures import WatchBounds
from rayspec.serving.flags import arguments
from rayspec.serving.process import ServerProcess, free_port

TOKENS = 32
# {fault: (damage before the version's record is made, after it is registered, what is said of it)}
BAD: dict[str, tuple[Callable[[Path], None] | None, Callable[[Path], None] | None, str]] = {
    "random": (make_random, None, "tau on the canary prompts is"),
    "worse": (add_noise, None, "on the 16 canary prompts that it answers as when it was measured is"),
    "nan": (put_nan, None, "fc.weight holds NaN or Inf"),
    "other-target": (name_other_target, None, "was trained for target"),
    "cut-short": (None, cut_short, "model.safetensors was cut short"),
    "tampered": (None, tamper, "model.safetensors was changed"),
}


def plain_answers(prompts: list[str], folder: Path) -> list[str]:
    """Of SGLang's server without speculation."""
    port = free_port()
    flags = arguments({"model_path": str(TARGET), **FLAGS, "port": port, "log_level": "warning"})
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    server = ServerProcess(command, port=port, environment=os.environ, log=folder / "plain.log", access=Access())
    try:
        server.wait_until_healthy(START_TIMEOUT_S)
        with httpx.Client(timeout=120, trust_env=False) as client:
            return [str(ask(client, server.address, prompt, TOKENS)[0]) for prompt in prompts]
    finally:
        server.stop(30)


@contextmanager
def served(folder: Path, port: int, *options: str) -> Iterator[Any]:
    """`rayspec serve` of the alias; whatever it started is gone afterwards."""
    environment = {**os.environ, "RAYSPEC_HOME": str(folder / "home")}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rayspec.cli", "serve", f"models:/{MODEL}@{ALIAS}", "--port", str(port), *options]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def servers(process: Any) -> list[psutil.Process]:
    """SGLang's, of all replicas and canaries."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            words = child.cmdline()
            if "sglang.launch_server" in words and "sh" not in words[:1]:
                found.append(child)
    return found


def is_healthy(port: int) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=30, trust_env=False).status_code == 200
    return False


@pytest.mark.slow
@pytest.mark.engine
def test_a_roll_over_costs_no_request(tmp_path: Path) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    known = {kind: canary_of(tmp_path / f"asked-{kind}", DRAFTERS[kind]) for kind in ("full", "slimspec")}
    first, second = (
        register(store, tmp_path / name, DRAFTERS[kind], tau=3.0, canary=known[kind])
        for name, kind in (("first", "full"), ("second", "slimspec"))
    )
    bad = {
        fault: register(store, tmp_path / fault, DRAFTERS["full"], tau=3.0, canary=known["full"], damage=damage)
        for fault, (damage, _, _) in BAD.items()
    }
    for fault, (_, damage, _) in BAD.items():
        if damage is not None:
            damage(tmp_path / fault)
    point_at(store, first)
    prompts = prompt_texts(6)
    port, log = free_port(), tmp_path / "serve.log"
    options = ["--follow", "--replicas", "1", "--poll-seconds", "2", "--watch-seconds", "20"]
    with ThreadPoolExecutor(1) as pool, served(tmp_path, port, *options, "--", "--log-level", "warning") as process:
        plain = pool.submit(plain_answers, prompts, tmp_path)
        wait_for(lambda: "started" in tags(store, first).get("rollover", ""), START_TIMEOUT_S, process, log)
        wait_for(lambda: is_healthy(port), 120, process, log)
        expected = plain.result()
        address = f"http://127.0.0.1:{port}"
        with streaming(address, prompts, expected, clients=6, max_tokens=TOKENS, pause_s=0.2) as outcomes:
            wait_for(lambda: outcomes.completed >= 20, 120, process, log)
            point_at(store, second)
            end = ("kept", "refused", "rolled_back", "rollback_failed")
            wait_for(lambda: tags(store, second).get("rollover") in end, START_TIMEOUT_S, process, log)
            assert tags(store, second)["rollover"] == "kept", log.read_text()[-4000:]
            wait_for(lambda: len(servers(process)) == 1, 120, process, log)
            victim = servers(process)[0]
            victim.send_signal(signal.SIGKILL)
            wait_for(lambda: not psutil.pid_exists(victim.pid), 60, process, log)
            wait_for(lambda: len(servers(process)) == 1, START_TIMEOUT_S, process, log)
            for version in bad.values():
                point_at(store, version)
                wait_for(lambda v=version: tags(store, v).get("rollover") in end, START_TIMEOUT_S, process, log)
                before = outcomes.completed
                wait_for(lambda n=before: outcomes.completed > n + 20, 120, process, log)
        counted = httpx.get(f"{address}/metrics", timeout=60).raise_for_status().text
        for event, times in (("swapped", 1), ("kept", 1), ("refused", len(bad)), ("rolled_back", 0)):
            assert f'rayspec_rollover_events_total{{event="{event}"}} {times:.1f}\n' in counted
        print(f"{outcomes.completed} completed, {outcomes.retriable} retriable, {outcomes.bad[:5]} bad")
        assert outcomes.bad == []
        assert outcomes.completed > 100
        for fault, (_, _, reason) in BAD.items():
            assert tags(store, bad[fault])["rollover"] == "refused"
            assert reason in tags(store, bad[fault])["rollover.reason"]
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []
    run = store.get_run(tags(store, second)["rollover.run_id"])
    lines = Path(store.download_artifacts(run.info.run_id, FILE, str(tmp_path))).read_text().splitlines()
    told = [(e["event"], e["version"]) for e in map(json.loads, lines)]
    assert told == [
        ("started", first),
        ("found", second),
        ("canary_passed", second),
        ("swapped", second),
        ("kept", second),
        *((event, version) for version in bad.values() for event in ("found", "refused")),
    ]


@contextmanager
def slowed(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """They stand still most of the time, as on a machine that others have taken."""
    is_over = threading.Event()

    def stutter() -> None:
        while not is_over.is_set():
            for number, seconds in ((signal.SIGSTOP, 0.25), (signal.SIGCONT, 0.05)):
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                time.sleep(seconds)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def kill_again_and_again(process: subprocess.Popen[bytes], old: set[int], log: Path, port: int) -> None:
    """The new server, each time that it answers, until it has died too often."""
    dead = set(old)
    for _ in range(WatchBounds().deaths + 1):
        wait_for(lambda: is_healthy(port), START_TIMEOUT_S, process, log)
        (victim,) = (server for server in servers(process) if server.pid not in dead)
        dead.add(victim.pid)
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: not is_healthy(port), 60, process, log)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(
    ("damage", "reason"),
    # one whose drafts are all wrong is beyond the bound of tau and, for it, of a token's time: which one is sure first
    [("slow", "ms under traffic"), ("dies", "3 of its servers died"), ("drafts less", "under traffic")],
)
def test_a_version_that_is_bad_under_traffic_is_rolled_back(tmp_path: Path, damage: str, reason: str) -> None:
    """Which the canary could not see: its server becomes slow, or dies, once it is in, or its evidence promised no more
    than it gives."""
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    first = register(store, tmp_path / "first", DRAFTERS["full"], tau=3.6)
    worse = {"tau": 1.0, "damage": make_random} if damage == "drafts less" else {"tau": 3.6}
    second = register(store, tmp_path / "second", DRAFTERS["full"], **worse)
    point_at(store, first)
    prompts = prompt_texts(6)
    expected = plain_answers(prompts, tmp_path)
    port, log = free_port(), tmp_path / "serve.log"
    options = ["--follow", "--replicas", "1", "--poll-seconds", "2", "--drain-seconds", "30"]
    options += ["--watch-seconds", "900" if damage == "dies" else "120"]
    with served(tmp_path, port, *options, "--", "--log-level", "warning") as process:
        wait_for(lambda: "started" in tags(store, first).get("rollover", ""), START_TIMEOUT_S, process, log)
        wait_for(lambda: is_healthy(port), 120, process, log)
        address = f"http://127.0.0.1:{port}"
        with streaming(address, prompts, expected, clients=4, max_tokens=TOKENS, pause_s=0.1) as outcomes:
            wait_for(lambda: outcomes.completed >= 60, 300, process, log)
            time.sleep(30)  # for enough readings of the counters before, however fast the requests are
            old = {server.pid for server in servers(process)}
            point_at(store, second)
            wait_for(lambda: tags(store, second).get("rollover") == "swapped", START_TIMEOUT_S, process, log)
            new = [server for server in servers(process) if server.pid not in old]
            slow = [child for server in new for child in server.children(recursive=True)] if damage == "slow" else []
            with slowed(slow):
                if damage == "dies":
                    kill_again_and_again(process, old, log, port)
                end = ("kept", "refused", "rolled_back", "rollback_failed")
                wait_for(lambda: tags(store, second).get("rollover") in end, START_TIMEOUT_S, process, log)
            assert tags(store, second)["rollover"] == "rolled_back", log.read_text()[-4000:]
            assert reason in tags(store, second)["rollover.reason"]
            before = outcomes.completed
            wait_for(lambda: outcomes.completed > before + 20, 120, process, log)
        assert outcomes.bad == []
        process.send_signal(signal.SIGTERM)
        process.wait(120)
