"""What stands before Ray Serve's HTTP proxy."""

import asyncio
from typing import Any

import pytest
from ray.serve._private.constants import (
    SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    SERVE_HTTP_REQUEST_ID_HEADER,
    SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    SERVE_MULTIPLEXED_MODEL_ID,
    SERVE_SESSION_ID,
)
from ray.serve._private.http_util import configure_http_middlewares
from ray.serve.config import HTTPOptions

from rayspec.serving.proxy import ORDERS, REQUEST_ID, VARIABLES, NoOrders, middlewares


def asked(scope: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(headers of the request that reaches the proxy, once for each; messages that do not come from it)."""
    reached: list[Any] = []
    sent: list[Any] = []

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["headers"])

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(NoOrders(proxy)(scope, receive, send))
    return reached, sent


def headers_that_reach(*headers: tuple[bytes, bytes]) -> list[Any]:
    reached, sent = asked({"type": "http", "headers": list(headers)})
    assert (len(reached), sent) == (1, [])
    return reached[0]


def test_orders_are_those_of_this_ray() -> None:
    found = {
        SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
        SERVE_SESSION_ID,
    }
    assert {name.decode() for name in ORDERS} == found
    assert REQUEST_ID.decode() == SERVE_HTTP_REQUEST_ID_HEADER


def test_a_request_gives_no_orders() -> None:
    kept = [(b"authorization", b"Bearer \xff"), (b"x-a", b"1")]
    orders = [(b"x_session_id", b"a"), *((name, b"1") for name in ORDERS)]
    assert headers_that_reach(*orders, *kept) == kept


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (b"of-mine", True),
        (b"schl\xfcssel", False),
        (b"", False),
        (b"\x1b[2J", False),
        (b"a b", False),
        (b"a" * 129, False),
    ],
)
def test_an_id_stays_that_is_a_plain_word(value: bytes, is_kept: bool) -> None:
    assert headers_that_reach((REQUEST_ID, value)) == [(REQUEST_ID, value)] * is_kept


def test_websockets_are_refused() -> None:
    assert asked({"type": "websocket", "headers": []}) == ([], [{"type": "websocket.close"}])


def test_ray_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, path),) = VARIABLES.items()
    monkeypatch.setattr(f"ray.serve._private.http_util.{name}", path)
    found = configure_http_middlewares(HTTPOptions()).middlewares
    assert [middleware.cls for middleware in found] == [middleware.cls for middleware in middlewares()]
