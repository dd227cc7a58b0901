"""A client that sends what no client should, again and again, beside one that goes on with its work; to SGLang's own
server, and through Ray Serve."""

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from unittest import mock

import httpx
import pytest
from fixture_models import prompt_texts
from hostile_requests import REQUESTS, Hostile
from hostile_wire import BODY, WIRES, answer, answered_instead, get, head, whole
from prometheus_client.parser import text_string_to_metric_families
from ray_server import ray_server
from stock_server import Server, limited_server

ROUNDS = 12
GROWTH_MIB = 24  # of the server's processes together, from the third round on
SETTLES_S = 60
LOOKS_EVERY_S = 1  # SGLang, for clients that left before their whole answer; by itself every 4 s
LONG = 1900  # tokens of an answer, which take several times as long as that
STARTS = {
    "speculative": limited_server,
    "plain": partial(limited_server, speculates=False),
    "ray": ray_server,
}


@pytest.fixture(scope="module", params=STARTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with (
        mock.patch.dict(os.environ, SGLANG_REQUEST_STATE_WAIT_TIMEOUT=str(LOOKS_EVERY_S)),
        STARTS[request.param](tmp_path_factory.mktemp("server")) as server,
    ):
        yield server
        assert {p.pid for p in server.processes()} == server.pids, "a process of the server ended"


def unserved(request: Hostile) -> bool:
    """What a plain server does serve."""
    return "speculat" not in request.says and "eam" not in request.says


@pytest.mark.slow
def test_a_hostile_client_is_answered_and_ends_nothing(server: Server, request: pytest.FixtureRequest) -> None:
    is_plain = request.node.callspec.params["server"] == "plain"
    requests = [r for r in REQUESTS if not is_plain or unserved(r)]
    assert len(requests) >= 100
    prompts = prompt_texts(8)
    expected = [server.text(prompt) for prompt in prompts]
    is_over = threading.Event()

    def go_on_with_its_work() -> int:
        done = 0
        while not is_over.is_set():
            prompt = done % len(prompts)
            assert server.text(prompts[prompt]) == expected[prompt]
            done += 1
        return done

    memory_mib = []
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(go_on_with_its_work)
        try:
            for _ in range(ROUNDS):
                wrong = [said for r in requests if (said := server.says_what_it_should(r)) is not None]
                assert not wrong, "\n".join(wrong)
                memory_mib.append(server.memory_mib())
        finally:
            is_over.set()
        served = other.result()
    print(f"{len(requests)} requests x {ROUNDS}, {served} answered beside them; MiB: {[round(m) for m in memory_mib]}")
    assert served >= ROUNDS
    assert [server.text(prompt) for prompt in prompts] == expected
    assert max(memory_mib[2:]) - memory_mib[2] < GROWTH_MIB, memory_mib


@pytest.mark.slow
def test_what_is_hardly_http_is_answered_and_ends_nothing(server: Server) -> None:
    assert len(WIRES) >= 100
    expected = server.text("import os")
    open_files = server.open_files()
    wrong = [said for wire in WIRES if (said := answered_instead(server.port, wire)) is not None]
    assert not wrong, "\n".join(wrong)
    assert server.text("import os") == expected
    settles(lambda: server.open_files() <= open_files + 10)


def settles(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SETTLES_S
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(1)


def samples(server: Server, name: str) -> list[float]:
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=60).text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return [sample.value for sample in found if sample.name == name]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("orders", [[], [b"x-request-disconnect-disabled: ?1"]], ids=["", "go_on_without_me"])
def test_work_ends_for_clients_that_leave(server: Server, stream: bool, orders: list[bytes]) -> None:
    running, aborted = "sglang:num_running_reqs", "sglang:num_aborted_requests_total"
    before = sum(samples(server, aborted))
    sampling = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
    body = json.dumps({"text": "import os", "stream": stream, "sampling_params": sampling}).encode()
    with ExitStack() as lines:
        for _ in range(8):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            line.sendall(whole(*orders, body=body))
        settles(lambda: sum(samples(server, running)) == 8)
    settles(lambda: sum(samples(server, aborted)) == before + 8)


@pytest.mark.slow
def test_a_client_that_leaves_ends_nobody_elses_request(server: Server) -> None:
    """Whatever it has called its own: SGLang's names of requests are hexadecimal, and its scheduler ends those that
    begin with the name of one that is aborted."""
    sampling = {"max_new_tokens": LONG, "ignore_eos": True}
    expected = server.text("import os", **sampling)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(partial(server.text, "import os", **sampling))
        settles(lambda: sum(samples(server, "sglang:num_running_reqs")) == 1)
        with ExitStack() as lines:
            for name in "0123456789abcdef":
                body = {"text": "import", "rid": name, "stream": True, "sampling_params": sampling}
                line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                line.sendall(whole(body=json.dumps(body).encode()))
            settles(lambda: sum(samples(server, "sglang:num_running_reqs")) > 1)
        assert other.result() == expected


@pytest.mark.slow
def test_clients_that_send_slowly_keep_nobody_from_an_answer(server: Server) -> None:
    """More than an actor of Ray Serve once took, which it then ended; and they leave in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(2200, hard - 200)
    expected = server.text("import os")
    open_files = server.open_files()
    with ExitStack() as lines:
        lines.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(count):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            line.sendall(head(b"Content-Length: %d" % len(BODY)) + BODY[:9])
        for _ in range(3):
            assert server.text("import os") == expected
    settles(lambda: server.open_files() <= open_files + 10)
    assert server.text("import os") == expected


@pytest.mark.slow
def test_no_client_makes_counters(server: Server) -> None:
    counter = "sglang:http_requests_total"
    before = len(samples(server, counter))
    for i in range(50):
        assert answer(server.port, get(b"/nobody/%d" % i))[0] == 404
        assert answer(server.port, get(b"/metrics", method=b"M%d" % i))[0] == 405
    assert len(samples(server, counter)) <= before + 1
