"""The sweep as a job of a Ray cluster, `ray start --head` and `ray job submit --working-dir . -- python jobs/sweep.py`:
real SGLang on the tests' models, a real MLflow store. (On a cluster of its own: what trains and calibrates, a sweep
whose engines answer at once in test_tracking_server.py, and test_faults.py.)

One sweep of conversations of two turns, closed and open loop, that measures until its intervals are narrow or the
passes are spent.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from canary_answers import served_answers
from fixture_models import DRAFTERS, PROMPTS, drafters_setting, prompt_texts, sweep_settings
from hostile import ask
from mlflow import MlflowClient
from mlflow.entities import Run
from safetensors.torch import load_file, save_file
from servers import START_TIMEOUT_S, ray_head

from rayspec.serving.canary import measured_tau
from rayspec.sweep.record.metric_names import metric_name
from rayspec.workloads.canary import CANARY_PROMPTS

ROOT = Path(__file__).parents[2]
SMALL = [*sweep_settings(4), "block_prompts=1", "max_new_tokens=8", "engine.max_total_tokens=8192"]


PASSES, CONVERSATIONS = 2, 4


def sweep(home: Path, *arguments: str, timeout_s: float = 1500, **variables: str) -> subprocess.CompletedProcess[str]:
    """By the script itself, for the slow tests."""
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


def submitted(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `ray job submit` says of the sweep with these arguments, whose cluster has ended since."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    with ray_head(home.parent) as (address, token):
        command = [str(Path(sys.executable).parent / "ray"), "job", "submit", "--address", address]
        command += ["--working-dir", ".", "--runtime-env-json", json.dumps({"env_vars": {"RAYSPEC_HOME": str(home)}})]
        command += ["--", "python", "jobs/sweep.py", *arguments]
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            done = subprocess.run(
                command, cwd=ROOT, env=environment | token, capture_output=True, text=True, timeout=1500, check=False
            )
            # of a head whose agent has not come yet
            if "please try again later" not in done.stderr or time.monotonic() > deadline:
                return done
            time.sleep(2)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Of commands that this process runs."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "home"


def test_plan_prints_the_trials_and_leaves_nothing(home: Path) -> None:
    answer = ask("sweep", "--plan", "concurrency=[1,8]", *SMALL)
    assert answer.code == 0, answer
    for trial in ("plain-c1", "plain-c8", "full-s4-c1", "slimspec-r32-s4-c8"):
        assert f"| {trial} " in answer.out
    assert "6 trials" in answer.out
    assert not home.exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("draftsteps=[4]", "error: the command line: unknown key 'draftsteps'; known: name, experiment"),
        ("drafters=[fulll]", "error: the command line: baseline must be one of"),
        (f"workload={PROMPTS}:100000", "asks for 100000 prompts"),
        ("target=/nowhere/target", "error: target is '/nowhere/target'"),
    ],
)
def test_a_config_that_cannot_run_ends_at_once(home: Path, argument: str, message: str) -> None:
    answer = ask("sweep", *sweep_settings(4), argument)
    assert answer.is_refusal, answer
    assert message in answer.err
    assert not home.exists()


def test_a_store_that_does_not_answer_leaves_no_sweep(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    answer = ask("sweep", *SMALL)
    assert answer.is_refusal, answer
    assert "error: MLflow at http://127.0.0.1:9 does not answer" in answer.err
    assert not (home / "sweeps").exists()


class Sweep:
    """A finished sweep: what it printed, and its runs in the store."""

    def __init__(self, process: subprocess.CompletedProcess[str], home: Path) -> None:
        self.process = process
        self.home = home
        self.client = MlflowClient(f"sqlite:///{home}/mlflow.db")
        experiment = self.client.get_experiment_by_name("rayspec-sweep")
        assert experiment is not None, process.stdout + process.stderr
        runs = self.client.search_runs([experiment.experiment_id])
        (self.parent,) = (r for r in runs if "mlflow.parentRunId" not in r.data.tags)
        self.children = {r.info.run_name: r for r in runs if r is not self.parent}

    def artifact(self, run: Run, path: str) -> Path:
        return Path(self.client.download_artifacts(run.info.run_id, path))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """Full and slimspec heads, a checkpoint that lacks a tensor, and one for another tokenizer."""
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
    records = [
        {"id": i, "category": "ab"[i % 2], "turns": [text, f"def volume_{i}(depth):\n"]}
        for i, text in enumerate(prompt_texts(CONVERSATIONS))
    ]
    (folder / "two.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    process = submitted(
        folder / "home",
        *(*SMALL, drafters_setting(DRAFTERS["full"], DRAFTERS["slimspec"], broken, foreign)),
        *(f"workload={folder}/two.jsonl", "draft_steps=[2]", "name=test"),
        *("concurrency=[1]", "request_rate=[20.0]", "stop.ci_width=1e-9", f"stop.max_repeats={PASSES}"),
        *("slo.ttft_ms=1e6", "slo.tpot_ms=1e6"),
    )
    return Sweep(process, folder / "home")


LOADS = ("c1", "r20")
GOOD = [f"{head}-{load}" for head in ("plain", "full-s2", "slimspec-r32-s2") for load in LOADS]


def test_broken_trials_fail_alone_with_their_cause(finished: Sweep) -> None:
    said = finished.process.stdout + finished.process.stderr
    assert finished.process.returncode == 1, said
    assert "exit code 1" in said  # of the driver; Ray's command has 1 for every failure
    assert "4 of 10 trials failed" in finished.process.stdout  # the job's log
    status = {name: run.info.status for name, run in finished.children.items()}
    bad = [f"{head}-s2-{load}" for head in ("broken", "foreign") for load in LOADS]
    assert status == {**dict.fromkeys(GOOD, "FINISHED"), **dict.fromkeys(bad, "FAILED")}
    assert finished.parent.info.status == "FINISHED"
    assert "missing fc.weight" in finished.children["broken-s2-c1"].data.tags["error"]
    assert "tokenizer" in finished.children["foreign-s2-r20"].data.tags["error"]


def requests_of(finished: Sweep, name: str) -> list[dict[str, Any]]:
    lines = finished.artifact(finished.children[name], "requests.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_every_turn_of_every_pass_is_answered(finished: Sweep) -> None:
    for name in GOOD:
        turns = Counter((r["prompt_id"], r["turn"]) for r in requests_of(finished, name))
        assert turns == {(str(i), t): PASSES for i in range(CONVERSATIONS) for t in (0, 1)}


def test_a_second_turn_s_prompt_holds_the_first_answer(finished: Sweep) -> None:
    records = requests_of(finished, "full-s2-c1")
    for first, second in zip(records[::2], records[1::2], strict=True):
        assert (first["turn"], second["turn"]) == (0, 1)
        assert second["prompt_tokens"] >= first["prompt_tokens"] + len(first["output_ids"]) - 1
        assert second["cached_tokens"] > 0  # the engine has seen what it begins with


def metrics_of(finished: Sweep, name: str) -> dict[str | None, float]:
    return {metric_name(key): value for key, value in finished.children[name].data.metrics.items()}


@pytest.mark.parametrize("name", GOOD)
def test_children_hold_the_metrics(finished: Sweep, name: str) -> None:
    child, metrics = finished.children[name], metrics_of(finished, name)
    assert child.data.tags["mlflow.parentRunId"] == finished.parent.info.run_id
    is_plain = name.startswith("plain")
    wanted = {"output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "itl_ms_p90", "output_tokens"}
    wanted |= {"goodput_share", "goodput_requests_per_s", "requests_per_s", "gflops_per_token"}
    if not is_plain:
        wanted |= {"tau", "accepted_drafts", "verify_steps", "tau_request_mean", "accept_pos_1", "accept_pos_2", "mbsu"}
        wanted |= {f"speedup_vs_plain{ci}" for ci in ("", "_ci_low", "_ci_high")}
        wanted |= {"step_head_ms", "request_head_ms", "step_requests", "output_mismatches"}
        wanted |= {"head_latency_us"} if "-c" in name else set()
    of_one_body = {"rho", "kappa", "speedup_vs_baseline", "speedup_vs_baseline_ci_low"}
    if "-c" in name:  # a head is timed alone at a number of rows, which an open loop does not have
        of_one_body.add("speedup_vs_baseline_predicted")
    assert wanted <= set(metrics)
    assert of_one_body & set(metrics) == (set() if is_plain else of_one_body)
    assert metrics["requests"] == PASSES * 2 * CONVERSATIONS
    assert metrics["goodput_share"] == 1
    assert 0.05 < metrics["peak_host_memory_gib"] < 64
    if not is_plain:
        assert metrics["tau"] == pytest.approx(1 + metrics["accepted_drafts"] / metrics["verify_steps"])
        assert metrics["tau"] == pytest.approx(1 + metrics["accept_pos_1"] + metrics["accept_pos_2"])
        assert metrics["output_mismatches"] == 0  # greedy float32: lossless
        assert metrics["mbsu"] < metrics["tau"]
        assert {"tau_category/a", "tau_category/b"} <= set(child.data.metrics)
        plain = metrics_of(finished, f"plain-{name.rpartition('-')[2]}")
        assert metrics["gflops_per_token"] > plain["gflops_per_token"]  # rejected drafts cost work


def test_blocks_are_steps(finished: Sweep) -> None:
    history = finished.client.get_metric_history(
        finished.children["full-s2-c1"].info.run_id, "per_block/output_tokens_per_s"
    )
    # the rounds at one stream; those between are of the other loads
    assert [m.step for m in history] == list(range(0, PASSES * CONVERSATIONS * len(LOADS), len(LOADS)))


def test_provenance_and_parameters_are_complete(finished: Sweep) -> None:
    tags, child = finished.parent.data.tags, finished.children["slimspec-r32-s2-c1"]
    for tag in ("git.commit", "git.dirty", "version.sglang", "version.torch", "version.ray", "version.mlflow"):
        assert tags[tag]
    assert tags["host.cpu"] != "unknown"
    assert tags["engine.dtype"] == "float32"  # what costs are counted in
    assert tags["command"].startswith("rayspec sweep ")
    assert child.data.params["sweep.workload"].endswith("/two.jsonl")
    assert child.data.params["head.kind"] == "slimspec"
    assert child.data.params["head.rank"] == "32"
    assert "draft_steps:\n- 2\n" in finished.artifact(finished.parent, "config.yaml").read_text()
    records = requests_of(finished, "slimspec-r32-s2-c1")
    assert len({r["prompt_id"] for r in records}) == CONVERSATIONS
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


def test_its_winner_is_served_as_it_was_measured(finished: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server of its own, which was started with it, where the sweep had swapped it in."""
    monkeypatch.setenv("RAYSPEC_HOME", str(finished.home))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{finished.home}/mlflow.db")
    answer = ask("report", "--promote", "--force")
    assert answer.code == 0, answer
    (model,) = finished.client.search_registered_models()
    source = f"models:/{model.name}/1"
    champion, answers = served_answers(source, finished.client)
    assert [a.prompt for a in champion.record.canary] == list(CANARY_PROMPTS)
    found = measured_tau(answers, champion.record)
    assert found is not None
    assert found.prompts == len(CANARY_PROMPTS)
    assert found.now == found.measured > 1


def test_no_process_is_left(finished: Sweep) -> None:
    """Driver, Ray, engines: whatever inherited this sweep's home has ended. What Ray starts beside a job, to end it
    with its supervisor, looks for that once a second."""
    deadline = time.monotonic() + 10
    while left := _inherited(finished.home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _inherited(home: Path) -> list[list[str]]:
    processes = psutil.process_iter(["cmdline"])
    return [p.info["cmdline"] for p in processes if _environment(p).get("RAYSPEC_HOME") == str(home)]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return {}
