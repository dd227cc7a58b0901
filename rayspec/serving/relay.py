"""Passes a request on to a server as it came, and the answer back as it comes.

A stream (server-sent events) is passed on by whole events, so that an event can still report that the server died in
the middle. Every other answer is passed on once it is whole, so that it can still become a 503.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

RETRY_AFTER_S = 5
EVENT_STREAM = "text/event-stream"
EVENT_END = b"\n\n"
OF_A_CONNECTION = {  # headers that concern one hop, or are set anew by each
    "connection",
    "content-length",
    "date",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
Headers = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A request. `path` is with its query; `prompt` is what a prefix-aware router reads, and never empty."""

    method: str
    path: str
    headers: Headers = field(repr=False)  # one of them may hold a key
    body: bytes = field(repr=False)
    prompt: str = field(default="-", repr=False)


@dataclass(frozen=True)
class Taken:
    """The first message of a replica: it has the request."""


@dataclass(frozen=True, kw_only=True)
class ResponseHead:
    """The second: the answer begins. Its body follows as bytes."""

    status: int
    headers: Headers

    @property
    def streams(self) -> bool:
        return any(k.lower() == "content-type" and EVENT_STREAM in v for k, v in self.headers)


@dataclass(frozen=True, kw_only=True)
class ReplicaGone:
    """Sent in place of the response: nothing of an answer was sent, and another replica may be asked. `was_read`: the
    server may have read the request, and ended because of it."""

    reason: str
    was_read: bool


Message = Taken | ResponseHead | ReplicaGone | bytes


async def body_of(parts: AsyncIterator[bytes], max_bytes: int, announced: str = "") -> bytes | None:
    """None as soon as more than `max_bytes` have come, or are announced; 0: all are taken."""
    if max_bytes and announced.isdecimal() and int(announced) > max_bytes:
        return None
    read = bytearray()
    async for part in parts:
        read += part
        if max_bytes and len(read) > max_bytes:
            return None
    return bytes(read)


def path_of(scope: Mapping[str, Any]) -> str:
    """The path with its query, as they came: what is escaped in them stays so."""
    path, query = scope.get("raw_path") or quote(scope["path"]).encode(), scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def passed_on(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in OF_A_CONNECTION]


def prompt_of(body: bytes) -> str:
    """What an answer continues, as far as it is text: of `messages`, `prompt` or `text`; empty for all else."""
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            return ""
        return _text(next((request[name] for name in ("messages", "prompt", "text") if request.get(name)), ""))
    except (ValueError, RecursionError):  # the server says what is wrong with it
        return ""


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("content") or value.get("text"))
    return ""


def error_body(reason: str) -> dict[str, Any]:
    """The body of an error, in OpenAI's form."""
    return {"error": {"message": reason, "type": "service_unavailable", "param": None, "code": 503}}


def error_event(reason: str) -> bytes:
    """The last event of a stream that was cut off; without the [DONE] of one that is whole."""
    return b"data: " + json.dumps(error_body(reason)).encode() + EVENT_END


def _relative(name: str, value: str, asked: httpx.URL) -> str:
    """A redirection of a server to itself, which clients reach by another address."""
    if name.lower() != "location":
        return value
    try:
        url = httpx.URL(value)
    except httpx.InvalidURL:  # what it means is the client's to say
        return value
    return url.raw_path.decode("ascii") if (url.host, url.port) == (asked.host, asked.port) else value


async def relay(client: httpx.AsyncClient, passed: Passed) -> AsyncIterator[Message]:
    """The messages of a server's answer, from Taken. `client` knows its address."""
    yield Taken()
    asked = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in passed_on(passed.headers)]
    # not built by the client, which would add headers of its own, nor a URL, which httpx would set right
    target = {"target": passed.path.encode("latin-1")}
    request = httpx.Request(
        passed.method, client.base_url, headers=asked, content=passed.body or None, extensions=target
    )
    try:
        response = await client.send(request, stream=True)
    except httpx.LocalProtocolError as error:
        yield ResponseHead(status=400, headers=[("content-type", "application/json")])
        yield json.dumps({"error": {"message": f"no request: {error}", "type": "invalid_request_error"}}).encode()
        return
    except httpx.TransportError as error:
        yield ReplicaGone(
            reason=_died(error), was_read=not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        )
        return
    try:
        headers = [(k, _relative(k, v, request.url)) for k, v in passed_on(response.headers.multi_items())]
        head = ResponseHead(status=response.status_code, headers=headers)
        if head.streams:
            yield head
            async for part in _events(response):
                yield part
            return
        try:
            body = b"".join([part async for part in response.aiter_raw()])
        except httpx.TransportError as error:
            yield ReplicaGone(reason=_died(error), was_read=True)
            return
        yield head
        yield body
    finally:
        await response.aclose()  # SGLang ends a request whose client has left


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """Whole events; one that says so where the server dies."""
    rest = b""
    try:
        async for part in response.aiter_raw():
            whole, end, rest = (rest + part).rpartition(EVENT_END)
            if end:
                yield whole + end
    except httpx.TransportError as error:
        yield error_event(_died(error))
        return
    if rest:
        yield rest


def _died(error: Exception) -> str:
    return f"the server of this replica has ended ({type(error).__name__}); send the request again"
