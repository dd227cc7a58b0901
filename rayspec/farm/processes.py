"""Processes that an engine starts: their environment, their output, their end."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil


def end_processes(processes: list[psutil.Process], timeout_s: float = 5.0) -> None:
    """Kill those of the processes that are still alive, and wait for them."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=timeout_s)


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


@contextlib.contextmanager
def redirected_output(path: Path) -> Iterator[None]:
    """Send this process's stdout and stderr, and those of children started meanwhile, to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "ab") as log:
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
