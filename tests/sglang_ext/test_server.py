"""The stock server with stock flags, as a user starts it; and a start that must fail with a readable cause."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixture_models import DRAFTERS, TARGET, prompt_texts
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from volume import volume

from sglang_ext.artefacts import WEIGHTS
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter

START_TIMEOUT_S = 300
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


NEW_TOKENS = 12
SPECULATIVE = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "4"]
SHAPES = {
    1: ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"],
    4: ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "12"],
}


@contextmanager
def server_process(port: int, log: Path, *flags: str) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port), *flags]
    with log.open("w") as output:
        # a process group of its own, so that its scheduler and detokenizer end with it
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def post(port: int, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def stream(port: int, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


def texts(tmp_path: Path, prompts: list[str], *flags: str) -> list[tuple[str, str]]:
    """(/generate, /v1/completions) of every prompt from a server of its own, eight requests at a time."""
    port, log = free_port(), tmp_path / f"server{len(flags)}.log"

    def answer(prompt: str) -> tuple[str, str]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        native = post(port, "/generate", {"text": prompt, "sampling_params": sampling})
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS}
        return native["text"], post(port, "/v1/completions", body)["choices"][0]["text"]

    with server_process(port, log, *flags) as process:
        wait_until_healthy(process, port, log)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(answer, prompts))
        sampled = {"model": "demo", "prompt": prompts[0], "temperature": 1.0, "top_p": 0.9, "max_tokens": 8}
        assert post(port, "/v1/completions", sampled)["usage"]["completion_tokens"] >= 1
        if "--enable-metrics" in flags:
            stream(port, {**sampled, "max_tokens": 24})  # of which alone the times between tokens are known
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
                (tmp_path / "metrics").write_bytes(response.read())
    return answers


def check_metrics(text: str, most_drafts: int) -> None:
    """Our counters beside SGLang's, and in agreement with them."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def values(name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in samples if s.name == name}

    verified = values("rayspec_verified_requests_total", "draft_steps")
    accepted = values("rayspec_accepted_drafts_total", "position")
    seconds = values("rayspec_step_seconds_total", "part")
    calls = sum(s.value for s in samples if s.name == "sglang:spec_verify_calls_total")
    assert list(verified) == [str(most_drafts)]
    assert calls <= sum(verified.values()) <= 1.1 * calls, "a request that has ended may be in the step behind its end"
    assert [accepted[str(i)] for i in range(1, most_drafts + 1)] == sorted(accepted.values(), reverse=True)
    assert 0 < accepted["1"] < sum(verified.values())
    assert seconds.keys() == {"head", "draft", "verify"}
    assert all(s > 0 for s in seconds.values())
    silent = {"rayspec_policy_switches_total"}  # a labelled counter is not there before it counts
    assert dashboard_metrics() - {s.name for s in samples} == silent


def dashboard_metrics() -> set[str]:
    """Names of the metrics that the panels of docs/monitoring/grafana.json ask for."""
    panels = json.loads((ROOT / "docs" / "monitoring" / "grafana.json").read_text())["panels"]
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    return set(re.findall(r"\b(?:rayspec_|sglang:)\w+", asked.replace("sglang[:_]", "sglang:")))


@pytest.fixture(scope="module")
def many_prompts() -> list[str]:
    return prompt_texts(volume(200, 48))


@pytest.fixture(scope="module")
def plain_texts(tmp_path_factory: pytest.TempPathFactory, many_prompts: list[str]) -> list[tuple[str, str]]:
    return texts(tmp_path_factory.mktemp("plain"), many_prompts)


@pytest.mark.parametrize("topk", SHAPES)
def test_stock_server_answers_what_it_answers_without_speculation(
    topk: int, tmp_path: Path, many_prompts: list[str], plain_texts: list[tuple[str, str]]
) -> None:
    drafter = ["--speculative-draft-model-path", str(DRAFTERS["slimspec"])]
    flags = [*SPECULATIVE, *SHAPES[topk], *drafter, "--enable-metrics"]
    assert texts(tmp_path, many_prompts, *flags) == plain_texts
    check_metrics((tmp_path / "metrics").read_text(), 4)


def test_a_drafter_of_another_target_stops_the_start(tmp_path: Path) -> None:
    shutil.copytree(DRAFTERS["slimspec"], tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rayspec"]["target"]["tokenizer_sha256"] = "0" * 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    log = tmp_path / "server.log"
    drafter = ["--speculative-draft-model-path", str(tmp_path / "other")]
    with server_process(free_port(), log, *SPECULATIVE, *SHAPES[1], *drafter) as process:
        assert process.wait(timeout=START_TIMEOUT_S) != 0
    assert "was trained for target" in log.read_text()
    assert "train a drafter for this one: rayspec train" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["own", "stock"])
def test_a_drafter_that_holds_nan_stops_the_start(form: str, tmp_path: Path) -> None:
    """Also one that SGLang's own class loads."""
    folder = tmp_path / form
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    save_drafter(folder, drafter, info.target, stock=form == "stock")
    tensors = load_file(folder / WEIGHTS)
    tensors["fc.weight"][5, 7] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    log = tmp_path / "server.log"
    flags = ["--speculative-draft-model-path", str(folder)]
    with server_process(free_port(), log, *SPECULATIVE, *SHAPES[1], *flags) as process:
        assert process.wait(timeout=START_TIMEOUT_S) != 0
    assert f"drafter {folder}: fc.weight holds NaN or Inf" in log.read_text()


@pytest.mark.parametrize("topk", [1, 4])
def test_bad_tree_shapes_are_refused_before_a_start(topk: int) -> None:
    from sglang_ext.adapter.engine import engine_arguments

    nodes = 9 if topk == 1 else None
    with pytest.raises(ValueError, match="num_draft_tokens"):
        engine_arguments("target", "drafter", draft_steps=4, topk=topk, num_draft_tokens=nodes)
