"""The stock server with stock flags, as a user starts it; and a start that must fail with a readable cause."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import DRAFTERS, NEW_TOKENS, TARGET, Ids, Oracle

START_TIMEOUT_S = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server_process(port: int, log: Path, drafter: Path) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port)]
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter)]
    command += ["--speculative-num-steps", "4", "--speculative-eagle-topk", "4"]
    command += ["--speculative-num-draft-tokens", "12"]
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


def test_stock_server_answers_what_plain_decoding_answers(
    tmp_path: Path, prompts: list[Ids], oracle: Oracle, tokenizer: Any
) -> None:
    port, log = free_port(), tmp_path / "server.log"
    with server_process(port, log, DRAFTERS["slimspec"]) as process:
        wait_until_healthy(process, port, log)
        for prompt, answer in list(zip(prompts, oracle.answers, strict=True))[:10]:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
            native = post(port, "/generate", {"input_ids": prompt, "sampling_params": sampling})
            assert native["text"] == text
            body = {"model": "x", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS}
            assert post(port, "/v1/completions", body)["choices"][0]["text"] == text
        sampled = {"model": "x", "prompt": prompts[0], "temperature": 1.0, "top_p": 0.9, "max_tokens": 8}
        assert post(port, "/v1/completions", sampled)["usage"]["completion_tokens"] >= 1


def test_a_drafter_of_another_target_stops_the_start(tmp_path: Path) -> None:
    shutil.copytree(DRAFTERS["slimspec"], tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    config["rayspec"]["target"]["tokenizer_sha256"] = "0" * 64
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    log = tmp_path / "server.log"
    with server_process(free_port(), log, tmp_path / "other") as process:
        assert process.wait(timeout=START_TIMEOUT_S) != 0
    assert "was trained for target" in log.read_text()
    assert "train a drafter for this one: python jobs/train.py" in log.read_text()


@pytest.mark.parametrize("topk", [1, 4])
def test_bad_tree_shapes_are_refused_before_a_start(topk: int) -> None:
    from sglang_ext.adapter.engine import engine_arguments

    nodes = 9 if topk == 1 else None
    with pytest.raises(ValueError, match="num_draft_tokens"):
        engine_arguments("target", "drafter", draft_steps=4, topk=topk, num_draft_tokens=nodes)
