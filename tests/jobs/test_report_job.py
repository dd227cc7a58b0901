"""The command `rayspec report` on stores that hold nothing or cannot be reached."""

from pathlib import Path

import pytest
from hostile import ask


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")  # also what the command itself sets is taken back
        monkeypatch.delenv(name)


def test_a_store_without_sweeps(tmp_path: Path) -> None:
    answer = ask("report")
    assert answer.is_refusal, answer
    assert answer.err.startswith("error: there is no MLflow store at sqlite:///")
    assert "that a sweep or rayspec report --promote has written" in answer.err
    assert list(tmp_path.iterdir()) == [], "who reads makes none"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://ada:correct%2Dhorse@127.0.0.1:9", "http://127.0.0.1:9"),
        ("postgresql+psycopg://ada:correct%2Dhorse@127.0.0.1:9/mlflow", "***@127.0.0.1:9"),
    ],
    ids=["server", "database"],
)
def test_a_store_that_does_not_answer(uri: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    answer = ask("report")
    assert answer.is_refusal, answer
    assert "error: MLflow at " in answer.err
    assert shown in answer.err
    assert "Check MLFLOW_TRACKING_URI" in answer.err
    assert not any(secret in answer.err + answer.out for secret in ("correct-horse", "correct%2Dhorse"))


def test_options_of_the_promotion_need_it() -> None:
    answer = ask("report", "--force")
    assert answer.is_refusal, answer
    assert "--force belongs to --promote; add that" in answer.err
