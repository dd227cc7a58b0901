"""Drafters as logged models and requests as traces, in a real SQLite store; on servers in test_tracking_server."""

from pathlib import Path

import mlflow
import pytest
from logged import check_logged, check_traces, check_version
from mlflow.entities import LoggedModel
from published import CAUSE, promoted, publish
from synthetic import SyntheticSweep, few_trials

from rayspec.driver.publish import representatives
from rayspec.driver.traces import log_traces
from rayspec.logged_models import find_models
from rayspec.report.promote import winner
from rayspec.sweep.record.stored import StoredSweep, find_sweep
from rayspec.tracking import Run, Tracker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def tracker(store: Path) -> Tracker:
    return Tracker(f"sqlite:///{store}/mlflow.db", "tests", (store / "artifacts").as_uri())


@pytest.fixture(scope="module")
def stored(store: Path, synthetic_sweep: SyntheticSweep) -> StoredSweep:
    tracker = Tracker(f"sqlite:///{store}/mlflow.db", "tests", (store / "artifacts").as_uri())
    return find_sweep(tracker.client, publish(tracker, synthetic_sweep))


def test_each_drafter_is_a_logged_model_with_its_metrics(stored: StoredSweep, synthetic_sweep: SyntheticSweep) -> None:
    check_logged(stored, synthetic_sweep)


def test_a_few_requests_of_each_trial_are_traces(stored: StoredSweep, synthetic_sweep: SyntheticSweep) -> None:
    check_traces(stored, synthetic_sweep)


def test_models_are_ranked_across_sweeps(
    tracker: Tracker, stored: StoredSweep, synthetic_sweep: SyntheticSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the call of MLflow's documentation. Another workload has no part in it."""
    again = publish(tracker, few_trials(synthetic_sweep, name="again"))
    other = publish(tracker, few_trials(synthetic_sweep, name="other", workload="code:8"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker.uri)
    (dataset,) = stored.datasets
    found: list[LoggedModel] = mlflow.search_logged_models(
        experiment_ids=[stored.parent.info.experiment_id],
        filter_string=f"metrics.tau > 0 AND source_run_id IN ('{stored.run_id}', '{again}', '{other}')",
        datasets=[{"dataset_name": dataset.name, "dataset_digest": dataset.digest}],
        order_by=[{"field_name": "metrics.tau", "dataset_name": dataset.name, "ascending": False}],
        output_format="list",
    )
    of_one = [r.metrics["tau"] for r in representatives(synthetic_sweep.results).values()]
    of_other = [r.metrics["tau"] for r in representatives(few_trials(synthetic_sweep, name="again").results).values()]
    of_both = sorted(of_one + of_other, reverse=True)
    assert [next(m.value for m in model.metrics if m.key == "tau") for model in found] == of_both
    assert {model.source_run_id for model in found} == {stored.run_id, again}


def test_what_is_written_again_is_there_once(
    tracker: Tracker, synthetic_sweep: SyntheticSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same parent run from a new process that does not know what arrived, as after a cut while it published."""
    run_id = publish(tracker, few_trials(synthetic_sweep, name="twice"))

    def everything() -> tuple[list[object], ...]:
        models = find_models(tracker.client, tracker.experiment_id, run_id)
        metrics = [(m.model_id, k) for m in models.values() for k in m.metrics or ()]
        traces = tracker.client.search_traces(locations=[tracker.experiment_id], max_results=500)
        return (
            sorted((m.model_id, m.name, str(m.status)) for m in models.values()),
            sorted((id_, k.key, k.value, k.step, k.timestamp, k.dataset_digest) for id_, k in metrics),
            sorted((t.info.trace_id, len(t.data.spans)) for t in traces),
        )

    once = everything()
    monkeypatch.setattr(Run, "steps", lambda *_: set())
    publish(Tracker(tracker.uri, "tests"), few_trials(synthetic_sweep, name="twice"), run_id=run_id)
    assert everything() == once


def test_a_model_that_was_deleted_is_made_again(tracker: Tracker, synthetic_sweep: SyntheticSweep) -> None:
    run_id = publish(tracker, few_trials(synthetic_sweep, name="deleted"))
    gone = find_models(tracker.client, tracker.experiment_id, run_id)["full"]
    tracker.client.delete_logged_model(gone.model_id)
    publish(Tracker(tracker.uri, "tests"), few_trials(synthetic_sweep, name="deleted"), run_id=run_id)
    found = find_models(tracker.client, tracker.experiment_id, run_id)["full"]
    assert (found.model_id != gone.model_id, found.status) == (True, "READY")


def test_models_of_a_sweep_that_is_cut_off_have_failed_until_it_goes_on(tracker: Tracker) -> None:
    def sweep(error: BaseException | None, run_id: str | None = None) -> str:
        own = Tracker(tracker.uri, "tests")
        with own.parent("cut", {}, run_id=run_id, resume="rayspec sweep --resume cut") as parent:
            for label in ("done", "open/2.5%"):
                model = own.model(parent, label, {}, {"head.kind": "full"})
                if label == "done":
                    model.finish()
            if error:
                raise error
        return parent.run_id

    def status(run_id: str) -> dict[str, tuple[str, str | None, str | None]]:
        models = find_models(tracker.client, tracker.experiment_id, run_id).items()
        return {label: (m.status.value, m.tags.get("resume"), m.tags.get("error")) for label, m in models}

    with pytest.raises(KeyboardInterrupt):
        sweep(KeyboardInterrupt())
    (cut,) = tracker.search("attributes.run_name = 'cut'")
    resume, why = "rayspec sweep --resume cut", "the sweep ended before this did: KeyboardInterrupt: "
    assert status(cut.info.run_id) == {"done": ("READY", None, None), "open/2.5%": ("FAILED", resume, why)}
    sweep(None, cut.info.run_id)
    assert status(cut.info.run_id) == {"done": ("READY", None, None), "open/2.5%": ("READY", None, None)}


@pytest.mark.parametrize(("traces", "keep"), [(0, True), (5, False)])
def test_traces_are_as_many_as_the_config_says(
    traces: int, keep: bool, tracker: Tracker, synthetic_sweep: SyntheticSweep
) -> None:
    """5: of two blocks of four requests. Without `keep_output_ids` no answer is in them."""
    sweep = few_trials(synthetic_sweep, name=f"traces{traces}", traces=traces, keep_output_ids=keep)
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    check_traces(stored, sweep)


def test_a_promoted_version_names_its_model(stored: StoredSweep, tmp_path: Path) -> None:
    for _ in range(2):  # a second version of the same model
        promoted(stored, tmp_path / "report", "names-its-model")
    check_version(stored, "names-its-model", "2", tmp_path)
    noted = find_models(stored.client, stored.parent.info.experiment_id, stored.run_id)[
        winner(stored.results).trial.label
    ]
    assert noted.tags["mlflow.modelVersions"].count("names-its-model") == 2


def test_a_sweep_without_logged_models_is_promoted_as_before(
    tracker: Tracker, synthetic_sweep: SyntheticSweep, tmp_path: Path
) -> None:
    old = find_sweep(tracker.client, publish(tracker, few_trials(synthetic_sweep, name="old")))
    for model in find_models(tracker.client, tracker.experiment_id, old.run_id).values():
        tracker.client.delete_logged_model(model.model_id)
    done = promoted(old, tmp_path / "report", "old")
    version = tracker.client.get_model_version("old", done.version)
    assert "model_id" not in version.tags


def test_a_drafter_that_failed_says_why(stored: StoredSweep) -> None:
    broken = find_models(stored.client, stored.parent.info.experiment_id, stored.run_id)["broken"]
    assert (broken.status.value, broken.tags["error"], broken.metrics) == ("FAILED", CAUSE, None)


def test_a_server_that_takes_no_spans_costs_no_sweep(
    synthetic_sweep: SyntheticSweep, caplog: pytest.LogCaptureFixture
) -> None:
    class Old:
        asked = 0

        def start_trace(self, info: object) -> None: ...

        def log_spans(self, experiment_id: str, spans: object) -> None:
            self.asked += 1
            raise NotImplementedError("server version 3.3 is less than 3.4")

    blocks, client = next(iter(synthetic_sweep.blocks.values())), Old()
    for _ in range(2):
        log_traces(client, "1", "r", None, blocks[:1], 2, 0.0, with_output_ids=True)  # type: ignore[arg-type]
    said = [r.getMessage() for r in caplog.records if "version 3.3" in r.getMessage()]
    assert said == ["traces are without their parts: server version 3.3 is less than 3.4"]
    assert client.asked == 2 * 2 * 3
