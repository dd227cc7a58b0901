"""The report job from the command line, on stores that hold nothing or cannot be reached."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def report(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    return subprocess.run(
        [sys.executable, "jobs/report.py", *arguments],
        cwd=ROOT,
        env=environment | {"RAYSPEC_HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


def test_a_store_without_sweeps(tmp_path: Path) -> None:
    run = report(tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: there is no MLflow store at sqlite:///")
    assert "that a sweep or rayspec report --promote has written" in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == [], "who reads makes none"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://ada:correct%2Dhorse@127.0.0.1:9", "http://127.0.0.1:9"),
        ("postgresql+psycopg://ada:correct%2Dhorse@127.0.0.1:9/mlflow", "***@127.0.0.1:9"),
    ],
    ids=["server", "database"],
)
def test_a_store_that_does_not_answer(tmp_path: Path, uri: str, shown: str) -> None:
    run = report(tmp_path, MLFLOW_TRACKING_URI=uri)
    assert run.returncode == 2
    assert "error: MLflow at " in run.stderr
    assert shown in run.stderr
    assert "Check MLFLOW_TRACKING_URI" in run.stderr
    assert not any(secret in run.stderr + run.stdout for secret in ("correct-horse", "correct%2Dhorse"))
    assert "Traceback" not in run.stderr


def test_options_of_the_promotion_need_it(tmp_path: Path) -> None:
    run = report(tmp_path, "--force")
    assert run.returncode == 2
    assert "--model, --traffic and --force belong to --promote" in run.stderr
