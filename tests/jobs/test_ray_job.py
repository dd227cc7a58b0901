"""The sweep as a job of a Ray cluster: `ray start --head`, then `ray job submit --working-dir . -- python ...`."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, drafters_setting, sweep_settings
from mlflow import MlflowClient

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TINY = [*sweep_settings(2), drafters_setting(DRAFTERS["slimspec"]), "baseline=slimspec-r32", "draft_steps=[2]"]
TINY += ["block_prompts=1", "max_new_tokens=8", "head_latency=false", "engine.max_total_tokens=4096"]


# as README says: Ray's token authentication, named to the cluster and to whoever submits
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the dashboard of a cluster of one node, on ports of its own."""
    port = free_port()
    command = [str(BIN / "ray"), "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=2"]
    command += [f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
    # short, because Ray's socket paths are limited to 107 characters
    folder = f"/tmp/rs{os.getpid()}"
    command += [f"--temp-dir={folder}"]
    # Ray's workers are nice by default, and starve beside the other tests
    environment = {**os.environ, **TOKEN, "RAY_worker_niceness": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd="/tmp"
        )
    try:
        deadline = time.monotonic() + 120
        while True:
            assert head.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)


def test_the_sweep_runs_as_a_ray_job(dashboard: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    command = [str(BIN / "ray"), "job", "submit", "--address", dashboard, "--working-dir", "."]
    command += ["--runtime-env-json", f'{{"env_vars": {{"RAYSPEC_HOME": "{home}"}}}}']
    command += ["--", "python", "jobs/sweep.py", *TINY]
    run = subprocess.run(
        command, cwd=ROOT, env=environment | TOKEN, capture_output=True, text=True, timeout=900, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name("rayspec-sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert sorted(r.info.run_name for r in runs if "mlflow.parentRunId" in r.data.tags) == [
        "plain-c1",
        "slimspec-r32-s2-c1",
    ]
