"""A process of the fork server is what a spawned one would be, and ends with its owner."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines  # noqa: F401  (its server stays)
import psutil
import pytest

from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.cpu import fork_server
from sglang_ext.adapter.cpu.fork_server import ForkedProcess
from sglang_ext.adapter.cpu.imports import UNUSED

pytestmark = [pytest.mark.engine, pytest.mark.skipif(has_accelerator(), reason="the CPU platform's")]
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def start(target: Any, *args: Any) -> ForkedProcess:
    process = ForkedProcess(target=target, args=args)
    process.start()
    return process


def ended(target: Any, *args: Any) -> int | None:
    """The exit status of a process that does this."""
    process = start(target, *args)
    process.join(PATIENCE_S)
    return process.exitcode


def look_around(name: str) -> None:
    """Of where this process is, and what it has imported."""
    needed = ("sglang.srt.managers.scheduler", "sglang.srt.models.opt")  # a model that nothing of ours imports
    imported = [module in sys.modules for module in (*needed, *UNUSED)]
    print(os.getppid(), os.getcwd(), os.environ[name], *imported, flush=True)


def test_it_is_a_child_of_its_owner_with_its_folder_environment_and_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_RUN_ID", "first")
    assert ended(look_around, "SGLANG_RUN_ID") == 0
    server = fork_server.pid()
    monkeypatch.setenv("SGLANG_RUN_ID", "second")  # of each engine, so the server stays
    assert ended(look_around, "SGLANG_RUN_ID") == 0
    assert fork_server.pid() == server
    here, found = f"{os.getpid()} {tmp_path}", "True True False False"
    assert capfd.readouterr().out.splitlines()[-2:] == [f"{here} {run} {found}" for run in ("first", "second")]


@pytest.mark.slow
def test_another_environment_is_another_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(sys.exit, 0) == 0
    server = fork_server.pid()
    monkeypatch.setenv("RAYSPEC_TEST_OF_FORKS", "set")
    assert ended(look_around, "RAYSPEC_TEST_OF_FORKS") == 0
    assert fork_server.pid() != server
    monkeypatch.delenv("RAYSPEC_TEST_OF_FORKS")
    assert ended(sys.exit, 0) == 0
    assert fork_server.pid() == server, "which was kept"
    assert capfd.readouterr().out.splitlines()[-1] == f"{os.getpid()} {tmp_path} set True True False False"


def test_how_it_ended_is_known() -> None:
    assert ended(sys.exit, 7) == 7
    assert ended(signal.raise_signal, signal.SIGKILL) == -signal.SIGKILL
    assert ended(int, "not a number") == 1


def test_the_server_has_one_thread() -> None:
    """A lock that another held would never be let go of in a fork. Arrow's allocator looks after its own."""
    assert ended(sys.exit, 0) == 0
    names = {file.read_text().strip() for file in Path(f"/proc/{fork_server.pid()}/task").glob("*/comm")}
    assert names - {"jemalloc_bg_thd"} == {Path(f"/proc/{fork_server.pid()}/comm").read_text().strip()}
    assert len(list(Path(f"/proc/{fork_server.pid()}/task").iterdir())) <= 2


OWNER = """
import time
from forked import live
from sglang_ext.adapter.cpu import fork_server
process = fork_server.ForkedProcess(target=live)
process.start()
print(fork_server.pid(), process.pid, flush=True)
time.sleep(600)
"""


def test_they_end_with_a_killed_owner() -> None:
    folder = str(Path(__file__).parent)
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", OWNER],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        said: list[str] = []
        while len(said) < 2:
            line = owner.stdout.readline()
            assert line, f"the owner ended with {owner.wait(PATIENCE_S)} after it and its process had said {said}"
            said += [line] if line.strip() and "warn" not in line else []
        said.sort()
        assert said[1] == "alive\n"
        processes = [psutil.Process(int(pid)) for pid in said[0].split()]
        owner.kill()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert left == []
