"""`serve deploy`: a version that is not what its evidence says takes no traffic there either."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_models import DRAFTERS
from rollover_world import make_random, write_champion
from servers import START_TIMEOUT_S, ray_head
from test_serve_rollover import is_healthy

from rayspec.farm.processes import environment
from rayspec.serving.deployed import INGRESS
from rayspec.serving.ingress import SERVERS
from rayspec.serving.process import LOOPBACK, free_port

SERVE = str(Path(sys.executable).parent / "serve")


@pytest.mark.slow
@pytest.mark.engine
def test_a_bad_champion_changes_nothing_and_a_good_one_is_tried_once(tmp_path: Path) -> None:
    bad, good, home = tmp_path / "bad", tmp_path / "good", tmp_path / "home"
    write_champion(bad, DRAFTERS["full"], tau=3.0, damage=make_random)
    write_champion(good, DRAFTERS["full"], tau=3.0)
    port = free_port()
    with environment({"RAYSPEC_HOME": str(home)}), ray_head(tmp_path) as (address, token):
        variables = {**os.environ, **token}
        since = deploy(tmp_path, address, variables, port, source=str(good))
        assert end_of(address, variables, since)["status"] == "RUNNING"
        assert is_healthy(port)
        passed = {file: file.read_text() for file in home.rglob("*.passed")}
        assert [json.loads(text)["version"] for text in passed.values()] == [str(good)]
        since = deploy(tmp_path, address, variables, port, source=str(bad))
        servers = end_of(address, variables, since)
        assert servers["status"] == "DEPLOY_FAILED"
        said = str(servers)
        assert "takes no traffic: tau on the canary prompts is " in said
        assert "canary: false in the args" in said
        assert is_healthy(port), "the replica that was there goes on"
        assert set(home.rglob("*.passed")) == set(passed)
        logs = len(list((home / "serving").glob("*.log")))
        since = deploy(tmp_path, address, variables, port, source=str(good), requests_each=8)  # a new replica
        assert end_of(address, variables, since)["status"] == "RUNNING"
        assert len(list((home / "serving").glob("*.log"))) == logs + 1, "it was not tried again"


def deploy(folder: Path, address: str, variables: Mapping[str, str], port: int, **args: Any) -> float:
    """When it was asked for."""
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": LOOPBACK, "port": port},
        "applications": [
            {
                "name": SERVERS,
                "route_prefix": None,
                "import_path": "rayspec.serving.service:servers",
                "args": {"drain_s": 5, **args},
            },
            {"name": INGRESS, "route_prefix": "/", "import_path": "rayspec.serving.service:ingress"},
        ],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    since = time.time()
    subprocess.run([SERVE, "deploy", "-a", address, str(folder / "config.yaml")], env=variables, check=True)
    return since


def end_of(address: str, variables: Mapping[str, str], since: float) -> dict[str, Any]:
    """What becomes of the servers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        said = subprocess.run([SERVE, "status", "-a", address], env=variables, check=True, capture_output=True).stdout
        found: dict[str, Any] = yaml.safe_load(said)["applications"].get(SERVERS, {"status": "NOT_STARTED"})
        states = [d.get("replica_states", {}) for d in found.get("deployments", {}).values()]
        is_up = found["status"] == "RUNNING" and states == [{"RUNNING": 1}]
        is_new = found.get("last_deployed_time_s", 0.0) >= since
        if is_new and (is_up or found["status"] == "DEPLOY_FAILED"):
            return found
        assert time.monotonic() < deadline, said.decode()
        time.sleep(2)
