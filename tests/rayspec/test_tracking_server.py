"""The same code path on MLflow's server, with SQLite and with PostgreSQL, and what a person then sees in a browser."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import fake_sweep
import pytest
from fake_sweep import here
from fixture_models import TARGET, sweep_settings
from logged import check_logged, check_traces, check_version
from mlflow import MlflowClient
from published import download_champion, publish
from servers import START_TIMEOUT_S, chromium, login_proxy, mlflow_server, postgresql
from synthetic import SyntheticSweep

from rayspec.commands import report
from rayspec.driver.publish import representatives
from rayspec.names import short_names
from rayspec.report.decision import decision
from rayspec.report.page import write_report
from rayspec.report.promote import default_model, promote, winner
from rayspec.sweep.record.results import score
from rayspec.sweep.record.stored import StoredSweep, find_sweep
from rayspec.tracking import Tracker, TrackingError, connect
from sglang_ext.drafters.checkpoint import load_drafter

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Server:
    database: str
    address: str
    folder: Path  # of its files
    sweep: StoredSweep


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, synthetic_sweep: SyntheticSweep
) -> Iterator[Server]:
    """A server on one of the two databases, with a synthetic sweep in it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "sqlite":
        with mlflow_server(f"sqlite:///{folder}/mlflow.db", folder) as address:
            yield _with_sweep("sqlite", address, folder, synthetic_sweep)
        return
    with postgresql() as store, mlflow_server(store, folder) as address:
        yield _with_sweep("postgresql", address, folder, synthetic_sweep)


def _with_sweep(database: str, address: str, folder: Path, sweep: SyntheticSweep) -> Server:
    run_id = publish(Tracker(address, "rayspec-sweep"), sweep, draws=True)
    return Server(database=database, address=address, folder=folder, sweep=find_sweep(connect(address), run_id))


on_sqlite = pytest.mark.parametrize("server", ["sqlite"], indirect=True)


def test_everything_comes_back_over_the_network(server: Server, synthetic_sweep: SyntheticSweep) -> None:
    back = {r.trial.name: r for r in server.sweep.results}
    for result in synthetic_sweep.results:
        assert back[result.trial.name].metrics == pytest.approx(dict(result.metrics))
    history = server.sweep.client.get_metric_history(_run_id(server.sweep, "full-s2-c1"), "per_block/tau")
    assert [m.step for m in history] == list(range(8))
    statuses = [r.info.status for r in server.sweep.client.search_runs([server.sweep.parent.info.experiment_id])]
    assert sorted(statuses) == ["FAILED"] + ["FINISHED"] * 19


def test_models_and_traces_come_back_over_the_network(server: Server, synthetic_sweep: SyntheticSweep) -> None:
    check_logged(server.sweep, synthetic_sweep)
    check_traces(server.sweep, synthetic_sweep)


def test_models_are_ranked_on_a_dataset(server: Server, synthetic_sweep: SyntheticSweep) -> None:
    (dataset,) = server.sweep.datasets
    found = MlflowClient(server.address).search_logged_models(
        [server.sweep.parent.info.experiment_id],
        order_by=[{"field_name": "metrics.tau", "dataset_name": dataset.name, "ascending": False}],
    )
    taus = sorted((r.metrics["tau"] for r in representatives(synthetic_sweep.results).values()), reverse=True)
    assert [next(m.value for m in model.metrics if m.key == "tau") for model in found[:-1]] == pytest.approx(taus)
    assert found[-1].name == "broken", "what has no value comes last"


def test_report_and_champion_over_the_network(server: Server, tmp_path: Path) -> None:
    write_report(server.sweep, tmp_path / "report")
    first = (tmp_path / "report" / "report.md").read_text().splitlines()[0]
    assert first == f"**{decision(server.sweep.results)}**"
    done = promote(server.sweep, tmp_path / "report", winner(server.sweep.results))
    check_version(server.sweep, done.model, done.version, tmp_path)
    folder = download_champion(MlflowClient(server.address), "drafter-smollm2-135m", tmp_path / "champion")
    assert load_drafter(folder)[1].head.spec()["kind"] == "slimspec"


@pytest.mark.slow
def test_the_comparison_page_needs_no_click(server: Server, tmp_path: Path) -> None:
    """Trials as parallel coordinates: load, draft steps and head against throughput."""
    page = _screenshots(tmp_path) / f"comparison-{server.database}.png"
    with chromium(tmp_path / "profile", width=1500, height=900) as browser:
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import WebDriverWait

        browser.get(comparison_url(server))
        # PostgreSQL gives a run's metrics in no order, and the page takes the first
        axes = ["concurrency", "draft_steps", "head", *(["output_tokens_per_s"] if server.database == "sqlite" else [])]

        def drawn(_: object) -> bool:
            names = [e.text for e in browser.find_elements(By.CSS_SELECTOR, ".js-plotly-plot .axis-title")]
            return len(names) == 4 and names[: len(axes)] == axes

        WebDriverWait(browser, START_TIMEOUT_S).until(drawn, f"the page does not draw {axes}")
        for close in browser.find_elements(By.CSS_SELECTOR, "[aria-label='Close'], [aria-label='Close Assistant']"):
            if close.is_displayed():
                close.click()
        values = {e.text for e in browser.find_elements(By.CSS_SELECTOR, ".js-plotly-plot .axis text")}
        heads = short_names(["plain", "full", "slimspec-r128", "slimspec-r64", "slimspec-r32"]).values()
        assert set(heads) <= values
        text = browser.find_element(By.TAG_NAME, "body").text
        assert "Comparing 18 Runs from 1 Experiment" in text
        browser.save_screenshot(str(page))
    assert page.stat().st_size > 20_000


@pytest.mark.slow
def test_the_report_opens_in_a_browser(server: Server, tmp_path: Path) -> None:
    _, html = write_report(server.sweep, tmp_path / "report")
    with chromium(tmp_path / "profile", width=1200, height=900) as browser:
        browser.get(html.as_uri())
        images = browser.execute_script(
            "return [...document.images].map(i => [i.complete, i.naturalWidth, i.getBoundingClientRect().width])"
        )
        width = browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        browser.save_screenshot(str(_screenshots(tmp_path) / "report.png"))
    assert len(images) == 7
    assert all(complete and natural > 300 and shown > 300 for complete, natural, shown in images)
    assert width[0] <= width[1]  # nothing sticks out of the page


def comparison_url(server: Server) -> str:
    """MLflow's page that compares all trials that were measured."""
    ids = [server.sweep.run_ids[r.trial] for r in server.sweep.results if r.error is None]
    experiments = [server.sweep.parent.info.experiment_id]
    return f"{server.address}/#/compare-runs?runs={quote(json.dumps(ids))}&experiments={quote(json.dumps(experiments))}"


def _screenshots(default: Path) -> Path:
    """Kept for a person to look at where RAYSPEC_SCREENSHOTS names a folder."""
    folder = Path(os.environ.get("RAYSPEC_SCREENSHOTS") or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_id(sweep: StoredSweep, trial: str) -> str:
    return next(id_ for t, id_ in sweep.run_ids.items() if t.name == trial)


@on_sqlite
def test_a_login_by_mlflows_own_variables(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synthetic_sweep: SyntheticSweep
) -> None:
    """Password or token go to the server, and nowhere else."""
    secrets = ("correct-horse", "battery-staple")
    basic = base64.b64encode(f"ada:{secrets[0]}".encode()).decode()
    blocks = {trial: blocks[:2] for trial, blocks in list(synthetic_sweep.blocks.items())[:3]}
    few = replace(synthetic_sweep, blocks=blocks, results=score(synthetic_sweep.config, blocks, {}, {}))
    with login_proxy(server.address, {f"Basic {basic}", f"Bearer {secrets[1]}"}) as guarded:
        with pytest.raises(TrackingError, match=r"does not answer: .*401.*MLFLOW_TRACKING_USERNAME"):
            connect(guarded)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ada")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", secrets[0])
        run_id = publish(Tracker(guarded, "guarded"), few)
        monkeypatch.delenv("MLFLOW_TRACKING_USERNAME")
        monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", secrets[1])
        write_report(find_sweep(connect(guarded), run_id), tmp_path / "report")
    for file in (p for folder in (tmp_path, server.folder) for p in folder.rglob("*") if p.is_file()):
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in (*secrets, basic)), file


@on_sqlite
def test_a_password_in_the_address_is_told_to_nobody(
    server: Server, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sweep (its engines answer at once), its report and a refused login, with all that they print and leave."""
    secret = "correct-horse"
    basic = base64.b64encode(f"ada:{secret}".encode()).decode()
    with (
        tempfile.TemporaryDirectory(prefix="rs") as ray_folder,  # short: Ray's sockets lie there
        login_proxy(server.address, {f"Basic {basic}"}) as guarded,
    ):

        def of(login: str) -> AbstractContextManager[None]:
            uri = guarded.replace("://", f"://{login}@")
            return here(RAYSPEC_HOME=str(tmp_path / "home"), MLFLOW_TRACKING_URI=uri, RAY_TMPDIR=ray_folder)

        with of(f"ada:{secret}"):
            fake_sweep.main(["--candidates=2", f"--home={tmp_path / 'home'}"])
        with of("ada:correct%2Dhorse"):
            assert report.main([]) == 0
        with of(f"eve:{secret}"):
            assert report.main([]) == 2
        printed = "".join(capfd.readouterr())
        assert "MLFLOW_TRACKING_USERNAME" in printed
        assert "View run" not in printed
        files = [p for folder in (tmp_path, server.folder, Path(ray_folder)) for p in folder.rglob("*") if p.is_file()]
        assert any("gcs_server" in p.name for p in files)
        assert any(p.name == "report.html" for p in files)
        for hidden in (secret, basic, "correct%2Dhorse"):
            assert hidden not in printed
            assert not [p for p in files if hidden.encode() in p.read_bytes()]


@pytest.mark.slow
def test_a_real_sweep_on_postgresql(tmp_path: Path) -> None:
    """rayspec sweep and rayspec report as a user runs them, with Ray and SGLang, against the server."""
    with postgresql() as store, mlflow_server(store, tmp_path) as address:
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        environment |= {"RAYSPEC_HOME": str(tmp_path / "home"), "MLFLOW_TRACKING_URI": address}

        def job(*arguments: str) -> str:
            command = [sys.executable, *arguments]
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        small = [*sweep_settings(4), "block_prompts=1", "max_new_tokens=16", "engine.max_total_tokens=8192"]
        job("jobs/sweep.py", "draft_steps=[2]", "concurrency=[1,2]", "name=pg", *small)
        printed = job("jobs/report.py", "--sweep", "pg", "--out", str(tmp_path / "report"), "--promote", "--force")
        sweep = find_sweep(connect(address), "pg")
        assert printed.splitlines()[0] == decision(sweep.results)
        model = default_model(str(TARGET))
        assert f"models:/{model}@champion is now version 1" in printed
        assert all(r.error is None for r in sweep.results)
        assert any(name.startswith("system/") for name in sweep.parent.data.metrics)
        load_drafter(download_champion(sweep.client, model, tmp_path / "champion"))
