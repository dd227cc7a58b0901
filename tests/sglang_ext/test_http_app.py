"""What our plugin adds to SGLang's HTTP application; through a real server in test_server.py."""

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
from fastapi.exceptions import EndpointContext, RequestValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from sglang_ext.adapter.http_app import (
    VARIABLE,
    BodyLimit,
    counted_path,
    max_body_bytes,
    no_place,
    prepare_app,
)

LIMIT = 1000


async def _length(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def _as_sglang(request: Request) -> Response:
    """FastAPI answers whatever goes wrong while it reads with status 400."""
    try:
        return JSONResponse(len(await request.body()))
    except Exception:  # as FastAPI does
        return JSONResponse("There was an error parsing the body", 400)


APP = Starlette(routes=[Route("/length", _length, methods=["POST"]), Route("/sglang", _as_sglang, methods=["POST"])])


def ask(route: str, parts: Sequence[bytes], announced: int | None = None) -> tuple[int, bytes, int]:
    """(status, answer, parts that were read) of a request whose body comes in these parts."""
    headers = [] if announced is None else [(b"content-length", str(announced).encode())]
    scope = {"type": "http", "method": "POST", "path": route, "headers": headers, "query_string": b""}
    sent: list[Any] = []
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1
        return {"type": "http.request", "body": parts[read - 1], "more_body": read < len(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(APP, max_bytes=LIMIT)(scope, receive, send))
    assert [m["type"] for m in sent].count("http.response.start") == 1
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent), read


@pytest.mark.parametrize("route", ["/length", "/sglang"])
def test_a_body_of_the_limit_goes_through(route: str) -> None:
    assert ask(route, [b"x" * LIMIT], LIMIT)[:2] == (200, b"1000")
    assert ask(route, [b"x" * 600, b"x" * 400])[:2] == (200, b"1000")


@pytest.mark.parametrize("route", ["/length", "/sglang"])
def test_a_larger_one_is_refused(route: str) -> None:
    """By the length that it names without reading any of it, else once more than the limit has come."""
    status, text, read = ask(route, [b"x"] * 9, LIMIT + 1)
    assert (status, read) == (413, 0)
    assert b"larger than 0.000953674 MiB" in text
    assert ask(route, [b"x" * 600] * 9)[::2] == (413, 2)
    assert ask(route, [b"x" * 600] * 9, 5)[::2] == (413, 2)
    assert ask(route, [b"x" * 600] * 9, -5)[::2] == (413, 2)


def test_an_error_of_the_application_stays_one() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(BodyLimit(broken, 5)({"type": "http", "headers": []}, None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("0", None), ("2", 2 * 2**20)])
def test_the_environment_says_how_much(text: str | None, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert max_body_bytes() == expected
    app = Starlette()
    prepare_app(lambda _: None, app)
    limits = [m.kwargs for m in app.user_middleware if m.cls is BodyLimit]
    assert limits == ([] if expected is None else [{"max_bytes": expected}])


@pytest.mark.parametrize("text", ["", "-1", "1.5", "many", "²", "99999999"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=rf"{VARIABLE} must be a whole number of MiB"):
        max_body_bytes()


def test_a_value_that_a_route_refuses_is_no_fault_of_the_server() -> None:
    async def broken(request: Request) -> Response:
        raise {"value": ValueError("no such parser"), "other": RuntimeError("boom")}[request.query_params["which"]]

    app = Starlette(routes=[Route("/", broken)])
    prepare_app(lambda _: None, app)
    client = TestClient(app, raise_server_exceptions=False)
    answer = client.get("/?which=value")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such parser")
    assert client.get("/?which=other").status_code == 500


def test_a_method_that_http_does_not_have_reaches_no_route() -> None:
    app = Starlette(routes=[Mount("/", Response("served"))])
    prepare_app(lambda _: None, app)
    client = TestClient(app)
    assert client.request("PATCH", "/").text == "served"
    answer = client.request("FOO", "/")
    assert (answer.status_code, answer.json()) == (405, {"detail": "Method Not Allowed"})
    assert "PATCH" in answer.headers["allow"].split(", ")


def test_unknown_paths_are_counted_together() -> None:
    assert counted_path(lambda _: ("/health", True), None) == ("/health", True)
    assert counted_path(lambda path: (path, False), "/nobody/1") == counted_path(
        lambda path: (path, False), "/nobody/2"
    )


def test_what_is_wrong_with_a_request_names_no_file() -> None:
    context = EndpointContext(function="f", path="POST /f", file="/secret/server.py", line=3)
    error = RequestValidationError([{"msg": "Field required"}], endpoint_ctx=context)
    named = inspect.unwrap(RequestValidationError._format_endpoint_context)  # a test before may have hooked it
    assert "/secret/server.py" in named(error), "FastAPI no longer says so; the hook is not needed"
    with mock.patch.object(RequestValidationError, "_format_endpoint_context", lambda error: no_place(named, error)):
        assert str(error) == "1 validation error:\n  {'msg': 'Field required'}"
