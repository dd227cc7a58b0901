"""Processes that an engine starts: their environment, their output, their end."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from rayspec.disk import is_full

END_TIMEOUT_S = 5.0


def end_processes(processes: list[psutil.Process]) -> None:
    """Kill those of the processes that are still alive, and wait for them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more, waited for by its parent or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def reset_peak_memory(processes: list[psutil.Process]) -> None:
    """Let the peaks of `peak_memory_bytes` begin anew, where the kernel allows it (Linux, own processes)."""
    for process in processes:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peak_memory_bytes(processes: list[psutil.Process]) -> int | None:
    """Sum of the processes' largest resident sets since the last reset; None where the kernel does not tell.

    Pages that several of them share count in each.
    """
    total = 0
    for process in processes:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return None
        peak = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
        if peak is not None:  # a process that has ended has none
            total += 1024 * int(peak.split()[1])
    return total or None


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for children started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _log(path: Path) -> BinaryIO:
    try:
        return open(path, "ab")
    except OSError as error:
        if not is_full(error):
            raise
        return open(os.devnull, "ab")


@contextlib.contextmanager
def redirected_output(path: Path) -> Iterator[None]:
    """Send this process's stdout and stderr, and those of children started meanwhile, to the end of a file; to nowhere
    where the disk is too full for a new one, which is no reason to measure nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with _log(path) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for original, fd in zip(saved, (1, 2), strict=True):
            os.dup2(original, fd)
            os.close(original)
