"""What passes through a replica, and what a client hears of a server that dies."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rayspec.serving import replica
from rayspec.serving.ingress import PAUSES_S, Ingress
from rayspec.serving.relay import Message, Passed, ReplicaGone, ResponseHead, Taken, body_of, path_of, prompt_of, relay


class Parts(httpx.AsyncByteStream):
    """A body that comes in parts; an error among them is raised."""

    def __init__(self, parts: Sequence[bytes | Exception]) -> None:
        self.parts, self.is_closed = parts, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if isinstance(part, Exception):
                raise part
            yield part

    async def aclose(self) -> None:
        self.is_closed = True


STREAM = {"content-type": "text/event-stream; charset=utf-8", "connection": "close", "x-mine": "1"}
DIED = httpx.RemoteProtocolError("peer closed connection")


def messages(answer: httpx.Response | Exception, passed: Passed | None = None) -> tuple[list[Message], httpx.Request]:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def all_of() -> list[Message]:
        async with httpx.AsyncClient(base_url="http://s", transport=httpx.MockTransport(handle)) as client:
            return [
                m async for m in relay(client, passed or Passed(method="GET", path="/health", headers=[], body=b""))
            ]

    return asyncio.run(all_of()), asked[0]


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ({"path": "/a\nb", "raw_path": b"/a%0ab", "query_string": b"q=%20"}, "/a%0ab?q=%20"),
        ({"path": "/a\nb", "query_string": b""}, "/a%0Ab"),
    ],
)
def test_a_path_stays_as_it_was_escaped(scope: dict[str, object], path: str) -> None:
    assert path_of(scope) == path


def read_by_a_server(passed: Passed) -> bytes:
    """The request on the wire."""

    async def all_of() -> bytes:
        read: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            read.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
                client.cookies.set("of", "another")
                async for _ in relay(client, passed):
                    pass
        return read[0].replace(address.removeprefix("http://").encode(), b"SERVER")

    return asyncio.run(all_of())


@pytest.mark.parametrize("path", ["/health?a=%zz", "//other/health", "/a/../health", "http://other/health", "*"])
def test_a_server_reads_what_the_client_has_sent(path: str) -> None:
    """Neither another path, nor one of another server, nor headers and cookies that it did not name."""
    passed = Passed(method="GET", path=path, headers=[("x-a", "1")], body=b"")
    assert read_by_a_server(passed) == f"GET {path} HTTP/1.1\r\nHost: SERVER\r\nx-a: 1\r\n\r\n".encode()


@pytest.mark.parametrize(("max_bytes", "taken"), [(0, True), (1000, False), (1800, True)])
def test_a_body_is_read_no_further_than_it_may_be_long(max_bytes: int, taken: bool) -> None:
    read = []

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(3):
            read.append(1)
            yield b"x" * 600

    body = asyncio.run(body_of(parts(), max_bytes))
    assert (body is not None, len(read)) == (taken, 3 if taken else 2)


@pytest.mark.parametrize(("announced", "reads"), [("1001", False), ("9" * 20, False), ("1000", True), ("-5", True)])
def test_a_body_that_is_announced_as_too_long_is_not_read(announced: str, reads: bool) -> None:
    read = []

    async def parts() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"x"

    assert (asyncio.run(body_of(parts(), 1000, announced)) is not None) == reads
    assert bool(read) == reads


def test_a_header_that_is_not_ascii_passes() -> None:
    passed = Passed(method="GET", path="/health", headers=[("authorization", "Bearer schl\xfcssel")], body=b"")
    _, request = messages(httpx.Response(401, stream=Parts([])), passed)
    assert (b"authorization", b"Bearer schl\xfcssel") in request.headers.raw


def test_what_is_no_request_is_the_clients_fault() -> None:
    (taken, head, body), _ = messages(httpx.LocalProtocolError("illegal target characters"))
    assert (taken, head) == (Taken(), ResponseHead(status=400, headers=[("content-type", "application/json")]))
    assert isinstance(body, bytes)
    assert "no request: illegal target" in json.loads(body)["error"]["message"]


def test_a_request_passes_as_it_came() -> None:
    headers = [("authorization", "Bearer k"), ("host", "public"), ("connection", "keep-alive"), ("x-a", "1")]
    passed = Passed(method="POST", path="/generate?a=b", headers=headers, body=b"{}")
    found, request = messages(httpx.Response(418, stream=Parts([b"te", b"a"]), headers={"x-b": "2"}), passed)
    assert (request.method, request.extensions["target"], request.content) == ("POST", b"/generate?a=b", b"{}")
    assert (request.headers["authorization"], request.headers["x-a"], request.headers["host"]) == ("Bearer k", "1", "s")
    assert found == [Taken(), ResponseHead(status=418, headers=[("x-b", "2")]), b"tea"]
    assert "Bearer" not in repr(passed)


def test_a_stream_passes_by_whole_events() -> None:
    body = Parts([b"data: 1\n\ndata: ", b"2\n", b"\ndata: 3\n\n", b"data: [DONE]"])
    found, _ = messages(httpx.Response(200, stream=body, headers=STREAM))
    head = ResponseHead(status=200, headers=[("content-type", STREAM["content-type"]), ("x-mine", "1")])
    assert found == [Taken(), head, b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n", b"data: [DONE]"]
    assert head.streams
    assert body.is_closed


def test_a_stream_that_is_cut_off_says_so() -> None:
    found, _ = messages(httpx.Response(200, stream=Parts([b"data: 1\n\ndata: {half", DIED]), headers=STREAM))
    assert found[2] == b"data: 1\n\n"
    last = found[3]
    assert isinstance(last, bytes)
    assert last.endswith(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == (503, "service_unavailable")
    assert "send the request again" in error["message"]


@pytest.mark.parametrize(
    ("answer", "was_read"),
    [
        (httpx.ConnectError("refused"), False),
        (httpx.ConnectTimeout("late"), False),
        (DIED, True),
        (httpx.Response(200, stream=Parts([b'{"half', DIED])), True),
    ],
)
def test_an_answer_that_never_began_can_be_asked_for_again(answer: httpx.Response | Exception, was_read: bool) -> None:
    found, _ = messages(answer)
    assert found[0] == Taken()
    assert isinstance(found[1], ReplicaGone)
    assert found[1].was_read is was_read
    assert len(found) == 2


def test_what_a_prefix_aware_router_reads() -> None:
    chat = [{"role": "user", "content": "hello"}]
    parts = {"role": "user", "content": [{"type": "text", "text": " you"}, {"type": "image_url"}]}
    assert prompt_of(json.dumps({"messages": [*chat, parts]}).encode()) == "hello you"
    assert prompt_of(b'{"prompt": "a", "text": "b"}') == "a"
    assert prompt_of(b'{"text": "b"}') == "b"
    deep = [b'{"prompt":' + b"[" * depth + b"]" * depth + b"}" for depth in (500, 100_000)]
    for body in (b"", b"no json", b"[]", b'{"input_ids": [1]}', b'{"prompt": {"a": 1}}', *deep):
        assert prompt_of(body) == ""


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("http://s/v1/chat/completions?a=1", "/v1/chat/completions?a=1"),
        ("/a", "/a"),
        ("http://other/a", "http://other/a"),
    ],
)
def test_a_redirection_to_the_server_itself_names_no_address(location: str, seen: str) -> None:
    found, _ = messages(httpx.Response(307, headers={"location": location}, stream=Parts([])))
    head = found[1]
    assert isinstance(head, ResponseHead)
    assert ("location", seen) in head.headers


def a_request() -> Request:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": json.dumps({"prompt": "a story"}).encode()}

    return Request(
        {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}, receive
    )


class Replicas:
    """In the place of Ray's handle: what the replica says that each call meets, the last of them from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *found: Sequence[Message | Exception]) -> None:
        self.found, self.asked_at, self.now = found, list[float](), 0.0
        monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: self)
        self.relay = SimpleNamespace(remote=self._messages)

    def options(self, **_: Any) -> "Replicas":
        return self

    async def _messages(self, passed: Passed) -> AsyncIterator[Message]:
        met = self.found[min(len(self.asked_at), len(self.found) - 1)]
        self.asked_at.append(self.now)
        for message in met:
            if isinstance(message, Exception):
                raise message
            yield message


GONE = (Taken(), ReplicaGone(reason="the server of this replica has ended", was_read=False))
ENDED_WITH_IT = (Taken(), ReplicaGone(reason="the server of this replica has ended", was_read=True))
BEGUN = (Taken(), ResponseHead(status=200, headers=[("content-type", "text/event-stream")]), b"data: 1\n\n")


def test_tries_outlast_a_replica_whose_server_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, GONE, (ActorDiedError(),), GONE)

    async def sleep(seconds: float) -> None:
        replicas.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    response = asyncio.run(Ingress(32, False)(a_request()))
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert replicas.asked_at == pytest.approx([0, PAUSES_S[0], sum(PAUSES_S)])
    assert sum(PAUSES_S) > replica.WATCH_S + replica.FAREWELL_S


@pytest.mark.parametrize(
    "found", [(ENDED_WITH_IT,), (ENDED_WITH_IT, (Taken(), ActorDiedError())), (GONE, ENDED_WITH_IT)]
)
def test_a_request_that_may_end_servers_is_given_to_two(
    found: Sequence[Sequence[Message | Exception]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(monkeypatch, *found)
    monkeypatch.setattr("rayspec.serving.ingress.PAUSES_S", (0.0, 0.0))
    response = asyncio.run(Ingress(32, False)(a_request()))
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")
    assert "retry-after" not in response.headers
    assert len(replicas.asked_at) == 2 + found.count(GONE)
    assert "2 servers ended while they had this request" in bytes(response.body).decode()


def test_a_request_that_ended_one_server_is_answered_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, ENDED_WITH_IT, BEGUN)
    response = asyncio.run(Ingress(32, False)(a_request()))
    assert (response.status_code, len(replicas.asked_at)) == (200, 2)


def test_a_stream_that_has_begun_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(monkeypatch, (*BEGUN, ActorDiedError()))

    async def body() -> list[Any]:
        response = await Ingress(32, False)(a_request())
        assert isinstance(response, StreamingResponse)
        return [part async for part in response.body_iterator]

    first, last = asyncio.run(body())
    assert first == b"data: 1\n\n"
    assert "send the request again" in json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert len(replicas.asked_at) == 1


def test_a_whole_answer_whose_replica_ends_before_it_is_here_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = ResponseHead(status=200, headers=[("content-type", "application/json")])
    replicas = Replicas(monkeypatch, (Taken(), head, ActorDiedError()), (Taken(), head, b'{"id": 1}'))
    response = asyncio.run(Ingress(32, False)(a_request()))
    assert (response.status_code, response.body, len(replicas.asked_at)) == (200, b'{"id": 1}', 2)


def test_a_client_that_leaves_ends_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray Serve cancels what it asks for."""
    replicas = Replicas(monkeypatch, GONE)

    async def leave() -> None:
        asked = asyncio.create_task(Ingress(32, False)(a_request()))
        while not replicas.asked_at:
            await asyncio.sleep(0)
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        assert asked.cancelled()

    asyncio.run(leave())
    assert len(replicas.asked_at) == 1


@pytest.mark.parametrize(("reads_prompts", "seen"), [(True, "a story"), (False, "/v1/completions")])
def test_a_body_is_looked_into_for_a_router_that_goes_by_prompts_alone(
    reads_prompts: bool, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Passed] = []

    async def answer(self: Ingress, passed: Passed) -> Response:
        asked.append(passed)
        return Response()

    monkeypatch.setattr(Ingress, "_asked", answer)
    asyncio.run(Ingress(32, reads_prompts)(a_request()))
    assert asked[0].prompt == seen


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault_of_the_server() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
    assert asyncio.run(Ingress(32, False)(Request(scope, receive))).status_code == 400
