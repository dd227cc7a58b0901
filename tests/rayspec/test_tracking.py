"""Runs in a real SQLite store."""

from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from rayspec.tracking import Tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")  # one for the module: its migrations take seconds


@pytest.fixture
def tracker(store: Path) -> Tracker:
    return Tracker(f"sqlite:///{store}/mlflow.db", "tests", (store / "artifacts").as_uri())


def test_parent_and_children_finish(tracker: Tracker, store: Path) -> None:
    with tracker.parent("sweep", {"kind": "sweep"}) as parent:
        parent.log_params({f"p{i}": i for i in range(150)})  # more than MLflow takes at once
        child = tracker.child(parent, "trial", {"head": "full"})
        child.log_metrics({"tau": 2.5})
        child.log_metrics({"block/tau": 2.0}, step=0)
        child.log_metrics({"block/tau": 3.0}, step=1)
        child.log_text("hello", "notes/hello.txt")
        child.finish()
    client = MlflowClient(tracker.uri)
    run = client.get_run(parent.run_id)
    assert run.info.status == "FINISHED"
    assert len(run.data.params) == 150
    kid = client.get_run(child.run_id)
    assert kid.info.status == "FINISHED"
    assert kid.data.tags["mlflow.parentRunId"] == parent.run_id
    assert kid.data.metrics == {"tau": 2.5, "block/tau": 3.0}
    assert [m.step for m in client.get_metric_history(child.run_id, "block/tau")] == [0, 1]
    path = store / "artifacts" / "tests" / child.run_id / "artifacts" / "notes" / "hello.txt"
    assert path.read_text() == "hello"


def test_a_failed_child_leaves_the_parent_alone(tracker: Tracker) -> None:
    with tracker.parent("sweep", {}) as parent:
        child = tracker.child(parent, "trial", {})
        child.fail("missing tensor fc.weight")
        child.finish()  # has no effect any more
    client = MlflowClient(tracker.uri)
    assert client.get_run(child.run_id).info.status == "FAILED"
    assert client.get_run(child.run_id).data.tags["error"] == "missing tensor fc.weight"
    assert client.get_run(parent.run_id).info.status == "FINISHED"


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(143)])
def test_nothing_is_left_running(tracker: Tracker, error: BaseException) -> None:
    runs = []

    def sweep() -> None:
        with tracker.parent("sweep", {}) as parent:
            runs.extend([parent, tracker.child(parent, "open", {}), tracker.child(parent, "done", {})])
            runs[2].finish()
            raise error

    with pytest.raises(type(error)):
        sweep()
    client = MlflowClient(tracker.uri)
    assert [client.get_run(r.run_id).info.status for r in runs] == ["FAILED", "FAILED", "FINISHED"]
    cause = client.get_run(runs[0].run_id).data.tags["error"]
    assert ("boom" in cause) if isinstance(error, RuntimeError) else (cause == "interrupted")


def test_an_overlong_parameter_lies_whole_in_an_artifact(tracker: Tracker) -> None:
    """As a list of many openings, which is known to be too long only once its answers are written."""
    value = "".join(f"{i}, " for i in range(2000))
    with tracker.parent("sweep", {}) as run:
        for _ in range(2):  # again after an outage
            run.log_params({"short": "x" * 6000, "answers.openings": value})
    params = run.client.get_run(run.run_id).data.params
    assert params["short"] == "x" * 6000
    kept, note = params["answers.openings"].split("…")
    assert value.startswith(kept)
    assert len(params["answers.openings"]) == 6000
    assert note == f" ({len(value):,} characters, whole in long_parameters/answers.openings.txt)"
    whole = Path(
        mlflow.artifacts.download_artifacts(
            run_id=run.run_id, artifact_path="long_parameters/answers.openings.txt", tracking_uri=tracker.uri
        )
    )
    assert whole.read_text() == value


def test_a_deleted_experiment_is_named(tracker: Tracker) -> None:
    gone = Tracker(tracker.uri, "gone")
    gone.client.delete_experiment(gone.experiment_id)
    with pytest.raises(ValueError, match=r"experiment 'gone' .* is deleted"):
        Tracker(tracker.uri, "gone")
