"""Requests that a generator makes of the server's own OpenAPI schema, some that fit it and some that do not: none ends
the server, none is answered with 500, and no answer is broken off; nor through Ray Serve."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import requests
from fixture_models import prompt_texts
from ray_server import ray_server
from stock_server import Server, limited_server

EXAMPLES = 8  # of each operation and kind
TIMEOUT_S = 120
# Schemas so deep that schemathesis takes minutes to find out how they can be broken; hostile_requests.py breaks them.
DEEP = ("/v1/completions", "/v1/chat/completions", "/invocations")


@pytest.fixture(scope="module", params=[limited_server, ray_server], ids=["one_machine", "ray"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with request.param(tmp_path_factory.mktemp("server")) as server:
        yield server


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
