"""The synthetic sweep of synthetic.py, made once, and a champion of it."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import published
import pytest
import shared_fixtures  # noqa: F401  (defines kernels so that they can be interpreted, before others import them)
from fixture_models import TARGET
from mlflow import MlflowClient
from synthetic import SyntheticSweep, make_synthetic_sweep, synthetic_request

from rayspec.records import RequestRecord
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import Tracker
from rayspec.training import drafter_report


@pytest.fixture
def make_request() -> Callable[..., RequestRecord]:
    return synthetic_request


@pytest.fixture(scope="session", autouse=True)
def draw_training() -> Iterator[Callable[[dict[str, Any]], bytes]]:
    """What draws a training's report. Drafters are trained here by the dozen, and their pictures, left out, would take
    longer than all else; tests/jobs/test_train.py has one drawn by the command."""
    draw = drafter_report._figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_report, "_figure", lambda report: b"of " + report["name"].encode())
        yield draw


@pytest.fixture(scope="session")
def synthetic_sweep() -> SyntheticSweep:
    """The shipped heads by name, 2 and 4 draft steps, 1 and 4 streams."""
    return make_synthetic_sweep()


@pytest.fixture(scope="session")
def results(synthetic_sweep: SyntheticSweep) -> list[TrialResult]:
    """A whole sweep's results: 4 heads, 2 and 4 draft steps, 1 and 4 streams."""
    return synthetic_sweep.results


@pytest.fixture(scope="session")
def promoted(tmp_path_factory: pytest.TempPathFactory, synthetic_sweep: SyntheticSweep) -> Path:
    """An MLflow store with a champion of the synthetic sweep on the fixture target, and the file of its run's id."""
    folder = tmp_path_factory.mktemp("store")
    tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())
    config = dataclasses.replace(synthetic_sweep.config, target=str(TARGET))
    results = [r for r in synthetic_sweep.results if r.trial.label in ("plain", "full", "slimspec-r64")]
    blocks = {r.trial: synthetic_sweep.blocks[r.trial] for r in results}
    sweep = SyntheticSweep(config=config, blocks=blocks, results=results)
    stored = find_sweep(tracker.client, published.publish(tracker, sweep))
    done = published.promoted(stored, folder / "report", "drafter-target")
    (folder / "run").write_text(stored.run_ids[done.winner.trial])
    return folder


@pytest.fixture
def champion_client(promoted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Of the store of `promoted`, with a home of its own."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{promoted}/mlflow.db")
    return MlflowClient(f"sqlite:///{promoted}/mlflow.db")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollover_cases import make_registry  # with Ray Serve, which takes seconds

    return make_registry(tmp_path_factory.mktemp("registry"))


@pytest.fixture
def world(registry: Path, tmp_path: Path) -> Any:
    """A `World` of rollover_cases.py, on a copy of the registry."""
    from rollover_cases import make_world

    return make_world(registry, tmp_path)
