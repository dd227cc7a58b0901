"""A client that sends what no client should, again and again, beside one that goes on with its work."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixture_models import DRAFTERS, prompt_texts
from hostile_requests import REQUESTS, Hostile
from stock_server import SHAPES, SPECULATIVE, Server, server_process, wait_until_healthy

from rayspec.serving.process import free_port

ROUNDS = 12
GROWTH_MIB = 24  # of the server's processes together, from the third round on


@pytest.fixture(scope="module", params=["speculative", "plain"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    drafter = [*SPECULATIVE, *SHAPES[1], "--speculative-draft-model-path", str(DRAFTERS["slimspec"])]
    with server_process(port, log, *(drafter if request.param == "speculative" else [])) as process:
        wait_until_healthy(process, port, log)
        yield Server(port, process.pid)


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
    assert {p.pid for p in server.processes()} == server.pids, "a process of the server ended"
    assert [server.text(prompt) for prompt in prompts] == expected
    assert max(memory_mib[2:]) - memory_mib[2] < GROWTH_MIB, memory_mib
