"""The sweep job from the command line: real Ray, real SGLang on the tests' models, a real MLflow store."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch
from fixture_models import DRAFTERS, PROMPTS, TARGET, drafters_setting, sweep_settings
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.torch import load_file, save_file
from small_world import untrained

from rayspec.sweep.record.metric_names import metric_name
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter

ROOT = Path(__file__).parents[2]
SMALL = [*sweep_settings(4), "block_prompts=1", "max_new_tokens=16", "engine.max_total_tokens=8192"]


def sweep(home: Path, *arguments: str, timeout_s: float = 1500, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    return subprocess.run(
        [sys.executable, "jobs/sweep.py", *arguments],
        cwd=ROOT,
        env=environment | {"RAYSPEC_HOME": str(home)} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_plan_prints_the_trials_and_leaves_nothing(tmp_path: Path) -> None:
    run = sweep(tmp_path / "home", "--plan", "concurrency=[1,8]", *SMALL)
    assert run.returncode == 0, run.stderr
    for trial in ("plain-c1", "plain-c8", "full-s4-c1", "slimspec-r32-s4-c8"):
        assert f"| {trial} " in run.stdout
    assert "6 trials" in run.stdout
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("draftsteps=[4]", "error: the command line: unknown key 'draftsteps'; known: name, experiment"),
        ("drafters=[fulll]", "error: the command line: baseline must be one of"),
        (f"workload={PROMPTS}:100000", "asks for 100000 prompts"),
        ("target=/nowhere/target", "error: target is '/nowhere/target'"),
    ],
)
def test_a_config_that_cannot_run_ends_at_once(tmp_path: Path, argument: str, message: str) -> None:
    run = sweep(tmp_path / "home", *sweep_settings(4), argument)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "home").exists()


def test_a_store_that_does_not_answer_leaves_no_sweep(tmp_path: Path) -> None:
    run = sweep(tmp_path / "home", *SMALL, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert run.returncode == 2
    assert "error: MLflow at http://127.0.0.1:9 does not answer" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "home" / "sweeps").exists()


class Sweep:
    """A finished sweep: what it printed, and its runs in the store."""

    def __init__(self, process: subprocess.CompletedProcess[str], home: Path) -> None:
        self.process = process
        self.home = home
        self.client = MlflowClient(f"sqlite:///{home}/mlflow.db")
        experiment = self.client.get_experiment_by_name("rayspec-sweep")
        assert experiment is not None, process.stderr
        runs = self.client.search_runs([experiment.experiment_id])
        (self.parent,) = (r for r in runs if "mlflow.parentRunId" not in r.data.tags)
        self.children = {r.info.run_name: r for r in runs if r is not self.parent}

    def artifact(self, run: Run, path: str) -> Path:
        return Path(self.client.download_artifacts(run.info.run_id, path))


def new_medusa(folder: Path) -> Path:
    """Untrained, so that it is hardly ever accepted."""
    target = FrozenTarget.load(TARGET, torch.float32)
    drafter = untrained(target, "medusa", {"positions": 2}, {"kind": "slimspec", "rank": 16})
    save_drafter(folder, drafter, target.info(tap_layers=()))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Full and slimspec heads, a Medusa drafter, a checkpoint that lacks a tensor, and one for another tokenizer."""
    folder = tmp_path_factory.mktemp("sweep")
    broken, foreign = folder / "broken", folder / "foreign"
    shutil.copytree(DRAFTERS["slimspec"], broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(DRAFTERS["slimspec"], foreign)
    config = json.loads((foreign / "config.json").read_text())
    config["rayspec"]["target"]["tokenizer_sha256"] = "0" * 64
    (foreign / "config.json").write_text(json.dumps(config))
    medusa = new_medusa(folder / "medusa")
    process = sweep(
        folder / "home",
        *SMALL,
        drafters_setting(DRAFTERS["full"], DRAFTERS["slimspec"], broken, foreign, medusa),
        "draft_steps=[2]",
        "concurrency=[1,2]",
        "name=test",
    )
    return Sweep(process, folder / "home")


GOOD = [f"{head}-c{c}" for head in ("plain", "full-s2", "slimspec-r32-s2", "medusa-s2") for c in (1, 2)]


def test_broken_trials_fail_alone_with_their_cause(finished: Sweep) -> None:
    assert finished.process.returncode == 1, finished.process.stderr
    assert "4 of 12 trials failed" in finished.process.stderr
    status = {name: run.info.status for name, run in finished.children.items()}
    bad = [f"{head}-s2-c{c}" for head in ("broken", "foreign") for c in (1, 2)]
    assert status == {**dict.fromkeys(GOOD, "FINISHED"), **dict.fromkeys(bad, "FAILED")}
    assert finished.parent.info.status == "FINISHED"
    assert "missing fc.weight" in finished.children["broken-s2-c1"].data.tags["error"]
    assert "tokenizer" in finished.children["foreign-s2-c2"].data.tags["error"]


@pytest.mark.parametrize("name", GOOD)
def test_children_hold_the_metrics(finished: Sweep, name: str) -> None:
    child = finished.children[name]
    assert child.data.tags["mlflow.parentRunId"] == finished.parent.info.run_id
    metrics = {metric_name(key): value for key, value in child.data.metrics.items()}
    wanted = {"output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p90", "requests", "output_tokens"}
    if not name.startswith("plain"):
        wanted |= {"tau", "accepted_drafts", "verify_steps", "tau_request_mean", "accept_pos_1", "accept_pos_2"}
        wanted |= {f"speedup_vs_plain{ci}" for ci in ("", "_ci_low", "_ci_high")}
        wanted |= {"head_latency_us", "step_head_ms", "output_mismatches"}
    of_one_body = {"rho", "kappa", "speedup_vs_baseline", "speedup_vs_baseline_ci_low", "speedup_vs_baseline_predicted"}
    is_kin = name.startswith(("full", "slimspec"))
    assert wanted <= set(metrics)
    assert of_one_body & set(metrics) == (of_one_body if is_kin else set())
    assert metrics["requests"] == (8 if name.startswith("plain") else 4)  # plain decoding stands in both cohorts
    if "tau" in metrics:
        assert metrics["tau"] == pytest.approx(1 + metrics["accepted_drafts"] / metrics["verify_steps"])
        assert metrics["tau"] == pytest.approx(1 + metrics["accept_pos_1"] + metrics["accept_pos_2"])
        assert metrics["output_mismatches"] == 0  # greedy float32: lossless


def test_blocks_are_steps(finished: Sweep) -> None:
    history = finished.client.get_metric_history(
        finished.children["full-s2-c1"].info.run_id, "per_block/output_tokens_per_s"
    )
    assert [m.step for m in history] == [0, 2, 4, 6]  # the rounds at one stream; those between are at two


def test_provenance_and_parameters_are_complete(finished: Sweep) -> None:
    tags, child = finished.parent.data.tags, finished.children["slimspec-r32-s2-c1"]
    for tag in ("git.commit", "git.dirty", "version.sglang", "version.torch", "version.ray", "version.mlflow"):
        assert tags[tag]
    assert tags["host.cpu"] != "unknown"
    assert tags["command"].startswith("rayspec sweep ")
    assert child.data.params["sweep.workload"] == f"{PROMPTS}:4"
    assert child.data.params["head.kind"] == "slimspec"
    assert child.data.params["head.rank"] == "32"
    assert "draft_steps:\n- 2\n" in finished.artifact(finished.parent, "config.yaml").read_text()
    lines = finished.artifact(child, "requests.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len({r["prompt_id"] for r in records}) == 4
    assert sum(r["accepted_drafts"] for r in records) == child.data.metrics["total/accepted_drafts"]


def test_figures_and_table_are_there(finished: Sweep) -> None:
    for name in ("speedup", "acceptance", "head_tradeoff"):
        assert finished.artifact(finished.parent, f"figures/{name}.png").stat().st_size > 5000
        root = ElementTree.parse(finished.artifact(finished.parent, f"figures/{name}.svg")).getroot()
        assert "slimspec-r32" in "".join(root.itertext())
    printed = finished.process.stdout
    assert finished.artifact(finished.parent, "summary.md").read_text().strip() in printed
    assert "1 stream: " in printed
    assert "mlflow ui --backend-store-uri sqlite:///" in printed


def test_no_process_is_left(finished: Sweep) -> None:
    """Driver, Ray, engines: whatever inherited this sweep's home has ended."""
    left = [p.name() for p in psutil.process_iter() if _environment(p).get("RAYSPEC_HOME") == str(finished.home)]
    assert left == []


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return {}
