"""A server as a child: nothing of it outlives its parent."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rayspec.serving import process
from rayspec.serving.access import Access
from rayspec.serving.canary_actor import outages_postpone
from rayspec.serving.process import ServerFailed, ServerProcess, free_port
from rayspec.serving.rollover import Postponed
from rayspec.serving.version import KEPT_LOGS, LOGGING, delete_old_logs

FAMILY = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""
HOLDERS = {
    "replica": """
import os, sys, time
from pathlib import Path
from rayspec.serving.access import Access
from rayspec.serving.process import ServerProcess
server = ServerProcess(sys.argv[2:], port=1, environment=os.environ, log=Path(sys.argv[1]), access=Access())
time.sleep(600)
""",
    "rayspec serve": """
import os, sys
from rayspec.serving.access import Access
from rayspec.serving.launch import serve
with open(sys.argv[1], "w") as log:
    os.dup2(log.fileno(), 1)
serve(sys.argv[2:], Access(), num_threads=None)
""",
}


def child(log: Path) -> int:
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return int(log.read_text())


def all_ended(*pids: int) -> bool:
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("how", ["stop", "the server is killed"])
def test_what_a_server_started_ends_with_it(how: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    server = ServerProcess([sys.executable, "-c", FAMILY], port=1, environment=os.environ, log=log, access=Access())
    grandchild = child(log)
    if how == "stop":
        server.stop(30)
    else:
        os.kill(server.pid, signal.SIGKILL)
        assert all_ended(server.pid)
        assert psutil.pid_exists(grandchild)
        server.kill()
    assert not server.is_alive
    assert all_ended(grandchild)
    server.kill()


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_server_and_its_keys_end_with_a_parent_that_is_killed(holder: str, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-c", HOLDERS[holder], str(log), sys.executable, "-c", FAMILY]
    parent = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})
    grandchild = child(log)
    server = psutil.Process(grandchild).ppid()
    assert [file.stat().st_mode & 0o777 for file in folder.glob("*/secret.yaml")] == [0o600]
    parent.kill()
    parent.wait()
    assert all_ended(server, grandchild)
    assert list(folder.iterdir()) == []


def test_keys_end_with_a_parent_that_is_killed_while_the_server_stops(tmp_path: Path) -> None:
    """SGLang's server kills its children when it is told to stop, and the parent may not live to see it ended."""
    log, folder = tmp_path / "log", tmp_path / "temporary"
    folder.mkdir()
    stopping = f"import psutil; [c.kill() for c in psutil.Process().children(recursive=True)]; {FAMILY}"
    command = [sys.executable, "-c", HOLDERS["rayspec serve"], str(log), sys.executable, "-c", stopping]
    parent = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)})
    grandchild = child(log)
    server = psutil.Process(grandchild).ppid()
    parent.kill()
    parent.wait()
    assert all_ended(server, grandchild)
    assert list(folder.iterdir()) == []


def test_a_log_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(process, "KEPT_LOG_BYTES", 100)
    log = tmp_path / "log"
    code = f"import os, time; go = {str(tmp_path / 'go')!r}; print('x' * 2000, flush=True)"
    code += "\nwhile not os.path.exists(go): time.sleep(0.05)\nprint('the last line', flush=True); time.sleep(600)"
    server = ServerProcess([sys.executable, "-c", code], port=1, environment=os.environ, log=log, access=Access())
    deadline = time.monotonic() + 60
    while log.stat().st_size < 2000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.shorten_log()
    assert log.read_text() == "x" * 99 + "\n"
    (tmp_path / "go").touch()
    while not log.read_text().endswith("the last line\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.shorten_log()
    server.kill()
    assert log.read_text() == "x" * 99 + "\nthe last line\n"


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    server = ServerProcess(command, port=1, environment=os.environ, log=tmp_path / "log", access=Access())
    with pytest.raises(ServerFailed, match=r"ended \(status 3\)\n.*\nno such model"):
        server.wait_until_healthy(60)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", r"ended \(signal 9\): it was killed, as for want of memory"),
        ("raise RuntimeError('Rank 0 scheduler died (exit code: -9).')", "it was killed, as for want of memory"),
        ("print('[Errno 98] bind: address already in use'); raise SystemExit(1)", "another process has taken its port"),
    ],
)
def test_a_server_that_was_taken_away_says_nothing_of_its_version(code: str, why: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", code]
    server = ServerProcess(command, port=1, environment=os.environ, log=tmp_path / "log", access=Access())
    with pytest.raises(Postponed, match=why) as caught, outages_postpone():
        server.wait_until_healthy(60)
    assert "end of" not in str(caught.value), "an event's reason is one line"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "Traceback (most recent call last):\\n  ...\\nValueError: of another target\\nthe next line",
            ": ValueError: of ano",
        ),
        ("Subprocess scheduler_0 (pid=7) crashed with exit code -11. Triggering SIGQUIT for cleanup...", ""),
    ],
)
def test_a_server_that_kills_itself_after_an_error_has_failed(said: str, cause: str, tmp_path: Path) -> None:
    """As SGLang does with all of its processes."""
    code = f"print('{said}', flush=True); import os; os.kill(os.getpid(), 9)"
    server = ServerProcess(
        [sys.executable, "-c", code], port=1, environment=os.environ, log=tmp_path / "log", access=Access()
    )
    with pytest.raises(ServerFailed, match=rf"ended \(signal 9\){cause}"), outages_postpone():
        server.wait_until_healthy(60)


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        monkeypatch.setattr(process, "PORTS", range(first, first + 1))
        with pytest.raises(OSError, match=f"from {first} to {first} is free"):
            free_port()
    assert free_port() == first


def test_logs_of_ended_servers_are_kept_to_the_newest(tmp_path: Path) -> None:
    ports = itertools.islice(filter(process.is_free, process.PORTS), KEPT_LOGS + 3)
    names = [f"drafter-{number}-{port}" for number, port in enumerate(ports)]
    for age, name in enumerate(reversed(names)):
        log = tmp_path / f"{name}.log"
        log.write_text("a line\n")
        log.with_suffix(LOGGING).write_text("{}")
        os.utime(log, (1000 - age, 1000 - age))
    others = [tmp_path / name for name in ("notes.log", "build-20261125.log", "31000.logging.json", "drafter-3-keys")]
    for other in others:
        other.write_text("somebody's")
        os.utime(other, (0, 0))
    with socket.socket() as runs:
        runs.bind((process.LOOPBACK, int(names[0].rpartition("-")[2])))
        delete_old_logs(tmp_path)
        delete_old_logs(tmp_path / "not there yet")
    kept = {path.name.removesuffix(".log") for path in tmp_path.glob("drafter-*.log")}
    assert kept == {names[0], *names[3:]}, "the oldest is of a server that runs"
    assert {path.name.removesuffix(LOGGING) for path in tmp_path.glob(f"drafter-*{LOGGING}")} == kept
    assert all(other.read_text() == "somebody's" for other in others)
