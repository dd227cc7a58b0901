"""The stock server with stock flags, as a user starts it; and a start that must fail with a readable cause."""

import json
import re
import shutil
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import running_engine
from fixture_models import DRAFTERS, prompt_texts
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from stock_server import (
    KEY,
    MAX_BODY_MIB,
    SHAPES,
    SPECULATIVE,
    START_TIMEOUT_S,
    Server,
    limited_server,
    post,
    server_process,
    wait_until_healthy,
)
from volume import volume

from rayspec.serving.figures import read_totals
from rayspec.serving.process import free_port
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.folder_kinds import WEIGHTS

ROOT = Path(__file__).parents[2]
NEW_TOKENS = 12
TIMEOUT_S = 120


def stream(port: int, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        assert response.read().endswith(b"data: [DONE]\n\n")


def check_metrics(text: str, most_drafts: int) -> None:
    """Our counters beside SGLang's, and in agreement with them."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def values(name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in samples if s.name == name}

    verified = values("rayspec_verified_requests_total", "draft_steps")
    drafted = values("rayspec_drafted_total", "position")
    accepted = values("rayspec_accepted_drafts_total", "position")
    seconds = values("rayspec_step_seconds_total", "part")
    calls = sum(s.value for s in samples if s.name == "sglang:spec_verify_calls_total")
    assert list(verified) == [str(most_drafts)]
    assert calls <= sum(verified.values()) <= 1.1 * calls, "a request that has ended may be in the step behind its end"
    assert drafted == {str(i): verified[str(most_drafts)] for i in range(1, most_drafts + 1)}
    assert [accepted[str(i)] for i in range(1, most_drafts + 1)] == sorted(accepted.values(), reverse=True)
    assert 0 < accepted["1"] < sum(verified.values())
    assert seconds.keys() == {"head", "draft", "verify"}
    assert all(s > 0 for s in seconds.values())
    # a labelled counter is not there before it counts, and what --follow has done is told by the ingress
    silent = {"rayspec_policy_switches_total", "rayspec_rollover_events_total"}
    assert dashboard_metrics() - {s.name for s in samples} == silent


def dashboard_metrics() -> set[str]:
    """Names of the metrics that the panels of docs/monitoring/grafana.json ask for."""
    panels = json.loads((ROOT / "docs" / "monitoring" / "grafana.json").read_text())["panels"]
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    return set(re.findall(r"\b(?:rayspec_|sglang:)\w+", asked.replace("sglang[:_]", "sglang:")))


@pytest.fixture(scope="module")
def many_prompts() -> list[str]:
    return prompt_texts(volume(200, 8))


@pytest.fixture(scope="module")
def plain_texts(many_prompts: list[str]) -> list[str]:
    with running_engine(None) as engine:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        return [answer["text"] for answer in engine.generate(many_prompts, sampling)]


@pytest.fixture(scope="module")
def server(plain_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """After the plain engine, which would not fork from the tests' server under this one's variables."""
    with limited_server(tmp_path_factory.mktemp("server")) as server:
        yield server


def check_answers(port: int, prompts: list[str], expected: list[str]) -> None:
    """Of /generate and /v1/completions, eight requests at a time; and that a drawn one is answered."""

    def answer(prompt: str) -> tuple[str, str]:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        native = post(port, "/generate", {"text": prompt, "sampling_params": sampling})
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": NEW_TOKENS}
        return native["text"], post(port, "/v1/completions", body)["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, prompts)) == [(text, text) for text in expected]
    assert post(port, "/v1/completions", drawn(prompts[0], 8))["usage"]["completion_tokens"] >= 1


def drawn(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "temperature": 1.0, "top_p": 0.9, "max_tokens": tokens}


def test_stock_server_answers_what_plain_decoding_does_and_counts_it(
    server: Server, many_prompts: list[str], plain_texts: list[str]
) -> None:
    check_answers(server.port, many_prompts, plain_texts)
    stream(server.port, drawn(many_prompts[0], 24))  # of which alone the times between tokens are known
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as response:
        text = response.read().decode()
    check_metrics(text, 4)
    counted = asdict(read_totals(text))
    assert {name for name, count in counted.items() if not count} == {"deaths"}, "a roll-over asks for SGLang's names"


@pytest.mark.slow
def test_a_server_with_a_tree_answers_the_same(many_prompts: list[str], plain_texts: list[str], tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "server.log"
    drafter = ["--speculative-draft-model-path", str(DRAFTERS["slimspec"])]
    with server_process(port, log, *SPECULATIVE, *SHAPES[4], *drafter) as process:
        wait_until_healthy(process, port, log)
        check_answers(port, many_prompts, plain_texts)


def test_bodies_over_the_limit_are_refused(server: Server) -> None:
    """By their announced length, and, in chunks, once they are too long; beside them the server goes on."""
    expected = server.text("import os")
    large = json.dumps({"text": "x" * (MAX_BODY_MIB << 20), "sampling_params": {"max_new_tokens": 2}}).encode()
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT_S) as client:
        for content in (large, (large[i : i + 50_000] for i in range(0, len(large), 50_000))):
            answer = client.post("/generate", content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == 413
            assert "larger than 1 MiB" in answer.json()["error"]["message"]
        whole = {"text": "import os", "sampling_params": {"max_new_tokens": 2}, "rid": "x" * 900_000}
        assert client.post("/generate", json=whole).status_code == 200
    with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as line:  # announces and sends nothing
        line.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert line.recv(100).startswith((b"HTTP/1.1 413", b"HTTP/1.1 400"))
    assert server.text("import os") == expected


def test_routes_that_change_the_server_take_the_administrators_key(server: Server) -> None:
    for route in ("/update_weights_from_disk", "/load_lora_adapter_from_tensors", "/pause_generation", "/flush_cache"):
        for headers in ({}, {"Authorization": "Bearer correct-horse"}):
            answer = httpx.post(f"http://127.0.0.1:{server.port}{route}", json={}, headers=headers, timeout=TIMEOUT_S)
            assert answer.status_code == 401, route
    address = f"http://127.0.0.1:{server.port}"
    key = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{address}/flush_cache", headers=key, timeout=TIMEOUT_S).status_code == 200
    no_key = {"Authorization": "Bearer schlüssel".encode()}  # cannot be compared
    assert httpx.post(f"{address}/flush_cache", headers=no_key, timeout=TIMEOUT_S).status_code == 401


@pytest.mark.parametrize("route", ["/server_info", "/get_server_info"])
def test_what_the_server_says_of_itself_holds_no_key(server: Server, route: str) -> None:
    said = httpx.get(f"http://127.0.0.1:{server.port}{route}", timeout=TIMEOUT_S)
    assert said.json()["admin_api_key"] == "<redacted>"
    assert said.json()["internal_states"][0]["admin_api_key"] == "<redacted>"
    assert "--admin-api-key <redacted> --max-queued-requests" in said.json()["launch_command"]
    assert KEY not in said.text


@pytest.mark.slow
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
