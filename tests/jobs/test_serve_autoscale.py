"""As many replicas as the load needs: a second under load, one again when that is over, and no request that fails."""

import time
from pathlib import Path

import pytest
from fixture_models import DRAFTERS, prompt_texts
from mlflow import MlflowClient
from rollover_world import point_at, register, streaming, wait_for
from servers import START_TIMEOUT_S
from test_serve_rollover import TOKENS, is_healthy, plain_answers, served, servers

from rayspec.serving.process import LOOPBACK, free_port

OPTIONS = ["--min-replicas", "1", "--max-replicas", "2", "--requests-each", "2", "--scale-down-seconds", "10"]


@pytest.mark.slow
@pytest.mark.engine
def test_replicas_come_and_go_with_the_load_and_no_request_fails(tmp_path: Path) -> None:
    store = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    point_at(store, register(store, tmp_path / "first", DRAFTERS["full"], tau=3.0))
    prompts = prompt_texts(6)
    expected = plain_answers(prompts, tmp_path)
    port, log = free_port(), tmp_path / "serve.log"
    with served(tmp_path, port, *OPTIONS) as process:
        wait_for(lambda: is_healthy(port), START_TIMEOUT_S, process, log)
        assert len(servers(process)) == 1
        ready = tmp_path / "home" / "serving"
        before = _ready(ready)  # the canary's, and the first
        address, seen = f"http://{LOOPBACK}:{port}", [("1 client", time.monotonic())]
        with streaming(address, prompts, expected, clients=1, max_tokens=TOKENS) as steady:
            with streaming(address, prompts, expected, clients=6, max_tokens=TOKENS) as busy:
                wait_for(lambda: len(servers(process)) == 2, START_TIMEOUT_S, process, log)
                seen.append(("a second server starts", time.monotonic()))
                wait_for(lambda: _ready(ready) > before, START_TIMEOUT_S, process, log)
                seen.append(("it is ready", time.monotonic()))
                done = busy.completed
                wait_for(lambda: busy.completed >= done + 12, START_TIMEOUT_S, process, log)
            seen.append(("1 client again", time.monotonic()))
            wait_for(lambda: len(servers(process)) == 1, START_TIMEOUT_S, process, log)
            seen.append(("one server again", time.monotonic()))
            done = steady.completed
            wait_for(lambda: steady.completed >= done + 3, START_TIMEOUT_S, process, log)
        for what, at in seen:
            print(f"{at - seen[0][1]:6.0f} s  {what}")
        print(f"{steady.completed + busy.completed} requests: {steady.retriable + busy.retriable} had to be sent again")
        assert steady.bad + busy.bad == []
        assert steady.retriable + busy.retriable == [], "neither a start nor an end of a replica is seen by a client"


def _ready(folder: Path) -> int:
    """Servers that have answered /health, as their logs say."""
    return sum("fired up and ready" in file.read_text(errors="replace") for file in folder.glob("*.log"))
