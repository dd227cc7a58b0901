"""Why a trial of Ray Tune failed last, in a line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayspec.sweep.measure.search import last_error

TRACEBACK = """Failure # {n} (occurred at 2026-11-23_03-12-{n}0)
ray::CohortTrainable.train() (pid=4, ip=127.0.0.1, actor_id=1, repr=<rayspec.sweep.measure.trainable.CohortTrainable>)
  File "trainable.py", line 331, in train
    raise skipped from exception_cause(skipped)
rayspec.sweep.measure.trainable.JournalFailed: attempt {n}
"""
DEATH = """Failure # {n} (occurred at 2026-11-23_03-12-{n}0)
The actor died unexpectedly before finishing this task.
\tclass_name: CohortTrainable
\tactor_id: 0123
Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (TRACEBACK.format(n=1), "rayspec.sweep.measure.trainable.JournalFailed: attempt 1"),
        (DEATH.format(n=1) + TRACEBACK.format(n=2), "rayspec.sweep.measure.trainable.JournalFailed: attempt 2"),
        (TRACEBACK.format(n=1) + DEATH.format(n=2), "The actor died unexpectedly before finishing this task."),
        ("", "an error that Ray did not tell; the engines' logs may"),
    ],
)
def test_the_last_failure_in_a_line(tmp_path: Path, text: str, wanted: str) -> None:
    (tmp_path / "error.txt").write_text(text)
    trial: Any = SimpleNamespace(error_file=str(tmp_path / "error.txt"))
    assert last_error(trial) == wanted


@pytest.mark.parametrize("file", [None, "/nowhere/error.txt"])
def test_without_a_file(file: str | None) -> None:
    trial: Any = SimpleNamespace(error_file=file)
    assert last_error(trial) == "an error that Ray did not tell; the engines' logs may"
