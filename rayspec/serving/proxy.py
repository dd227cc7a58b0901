"""What stands before all else in Ray Serve's HTTP proxy, in whose process it runs. By itself the proxy answers with 500
where it cannot read its own headers, keeps counters of every method, and takes orders from whoever sends a request.
"""

import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_ext.adapter.http_app import KnownMethods

VARIABLES = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.middlewares"}  # of the node that it runs on
# to go on without the client, to give up, and which replica to ask; SGLang reads none of them
ORDERS = (
    b"x-request-disconnect-disabled",
    b"x-request-timeout-seconds",
    b"x-session-id",
    b"serve-multiplexed-model-id",
)
REQUEST_ID = b"x-request-id"  # Ray Serve answers with it, and writes it into its logs
PLAIN_ID = re.compile(rb"[!-~]{1,128}")


class NoOrders:
    """ASGI middleware: takes those headers and an id that is no plain word out of a request, and refuses WebSockets
    (status 403)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
            return
        headers = [(name, value) for name, value in scope["headers"] if not _is_order(name, value)]
        await self.app({**scope, "headers": headers}, receive, send)


def _is_order(name: bytes, value: bytes) -> bool:
    return name.replace(b"_", b"-") in ORDERS or (name == REQUEST_ID and not PLAIN_ID.fullmatch(value))


def middlewares() -> list[Middleware]:
    """Called by Ray Serve's proxy when it starts."""
    return [Middleware(KnownMethods), Middleware(NoOrders)]
