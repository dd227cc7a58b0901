"""Requests that a generator makes of the server's own OpenAPI schema, some that fit it and some that do not, and bodies
that are too large: none ends the server, none is answered with 500, and no answer is broken off."""

import json
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import httpx
import pytest
import requests
from fixture_models import DRAFTERS, prompt_texts
from test_hostile_client import Server
from test_server import SHAPES, SPECULATIVE, free_port, server_process, wait_until_healthy

from sglang_ext.adapter.http_app import VARIABLE

EXAMPLES = 8  # of each operation and kind
MAX_BODY_MIB = 1
TIMEOUT_S = 120
# Schemas so deep that schemathesis takes minutes to find out how they can be broken; hostile_requests.py breaks them.
DEEP = ("/v1/completions", "/v1/chat/completions", "/invocations")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With what `rayspec serve` adds: an administrator's key, a limit on bodies and one on the queue."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    drafter = [*SPECULATIVE, *SHAPES[1], "--speculative-draft-model-path", str(DRAFTERS["slimspec"])]
    own = ["--admin-api-key", "battery-staple", "--max-queued-requests", "4096"]
    with (
        mock.patch.dict(os.environ, {VARIABLE: str(MAX_BODY_MIB)}),
        server_process(port, log, *drafter, *own) as process,
    ):
        wait_until_healthy(process, port, log)
        yield Server(port, process.pid)
        assert "battery-staple" not in log.read_text()


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
    key = {"Authorization": "Bearer battery-staple"}
    assert httpx.post(f"http://127.0.0.1:{server.port}/flush_cache", headers=key, timeout=TIMEOUT_S).status_code == 200


@pytest.mark.slow
def test_what_a_schema_allows_and_what_not_ends_nothing(server: Server) -> None:
    """Both kinds of requests for every operation that the server names."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (make install)")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.generation import GenerationMode

    base_url = f"http://127.0.0.1:{server.port}"
    schema = schemathesis.openapi.from_url(f"{base_url}/openapi.json")
    prompts = prompt_texts(4)
    expected = [server.text(prompt) for prompt in prompts]
    answers: Counter[int] = Counter()
    wrong: list[str] = []
    some = settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def ask(case: Any) -> None:
        try:
            answer = case.call(base_url=base_url, timeout=TIMEOUT_S)
        except schemathesis.errors.SerializationNotPossible:
            return
        except requests.exceptions.ChunkedEncodingError:
            wrong.append(f"{case.method} {case.formatted_path} {str(case.body)[:300]!r}: broken off")
            return
        answers[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code != 503:
            wrong.append(f"{case.method} {case.formatted_path} {str(case.body)[:300]!r}: {answer.text[:300]}")

    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in [GenerationMode.POSITIVE] if operation.path in DEEP else GenerationMode:
            with suppress(Unsatisfiable):  # nothing that one could say to the operation would be wrong
                some(given(case=operation.as_strategy(generation_mode=mode))(ask))()
        assert server.process.is_running(), f"{operation.label} ended the server"
    print(f"{answers.total()} requests; answers: {dict(sorted(answers.items()))}")
    assert answers.total() >= 100
    assert [server.text(prompt) for prompt in prompts] == expected
    assert {p.pid for p in server.processes()} == server.pids, "a process of the server ended"
    assert wrong == [], "\n".join(wrong)
