"""An engine in a process of its own, which starts when it is told to and measures when it is its turn.

The two take turns by files in a folder that they share: `ready`, the engine is up; `go`, it may measure; `rows.json`,
what it measured; `log`, what it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

READY, GO, ROWS, LOG = "ready", "go", "rows.json", "log"
LOG_LINES = 30


def wait_for_turn(folder: Path) -> None:
    """For the engine's process: say that it is up, and return when it is its turn. Raises SystemExit where the process
    that started it has gone, so that no engine waits on a card for ever."""
    starter = os.getppid()
    (folder / READY).touch()
    while not (folder / GO).exists():
        if os.getppid() != starter:
            raise SystemExit("the process that started this engine has gone")
        time.sleep(0.1)


class EngineProcess:
    """A process of steps.py, from its start to its answer; whatever it started ends with the block. `accepted`: tokens
    of each step, whatever the drafts are."""

    def __init__(self, command: Sequence[str], limit_s: float, accepted: int) -> None:
        self.limit_s, self.begun = limit_s, time.monotonic()
        self._failure: str | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="rayspec-")
        self._turn = Path(self._folder.name)
        path = os.pathsep.join(filter(None, sys.path))  # the suite runs from a copy of the files, not installed
        environment = {**os.environ, "SGLANG_SIMULATE_ACC_LEN": str(accepted), "PYTHONPATH": path}
        with (self._turn / LOG).open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--turn", str(self._turn)], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def wait_until_up(self) -> None:
        """Return once it waits for its turn. One that has taken too long is ended, so that it disturbs no other."""
        is_up = (self._turn / READY).exists
        self._wait(is_up, self.begun + self.limit_s)
        if not is_up():
            self._failure = self._what_happened()

    def measure(self) -> list[dict[str, Any]]:
        """Its answer, behind `wait_until_up`; RuntimeError with the end of its log if it gives none."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        (self._turn / GO).touch()
        self._wait(lambda: False, time.monotonic() + self.limit_s)
        if self._process.poll() != 0 or not (self._turn / ROWS).exists():
            raise RuntimeError(self._what_happened())
        return json.loads((self._turn / ROWS).read_text())

    def _wait(self, is_there: Callable[[], bool], until: float) -> None:
        while self._process.poll() is None and not is_there() and time.monotonic() < until:
            time.sleep(0.1)

    def _what_happened(self) -> str:
        status = self._process.poll()
        self._end()
        said = f"none within {self.limit_s} s" if status is None else status
        lines = (self._turn / LOG).read_text(errors="replace").splitlines()
        return "\n".join([f"exit status {said}", *lines[-LOG_LINES:]])

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
