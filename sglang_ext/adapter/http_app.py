"""What SGLang's HTTP application lacks: a limit on the body of a request, which it reads as a whole, whatever its size,
before it looks at a word of it; status 400 for what some of its routes answer with 500; counters that no client can
make; and answers that name no file of the server.

The limit is off unless the environment names one, which `rayspec serve` does.
"""

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPMethod
from typing import Any

from jinja2 import TemplateError

logger = logging.getLogger(__name__)
VARIABLE = "RAYSPEC_MAX_BODY_MIB"  # 0: no limit
DEFAULT_MIB = 32  # the default of `rayspec serve`: far more than the longest prompts, or some pictures
MAX_MIB = 2**20  # a TiB
VERTEX_ROUTE = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")  # as SGLang reads it
METHODS = frozenset(HTTPMethod)
UNKNOWN_PATH = "unknown"
UNREADABLE = (TypeError, AttributeError, LookupError, OverflowError)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyLimit:
    """ASGI middleware: answers with status 413, by the length that is announced, or as soon as more has come."""

    def __init__(self, app: Callable[..., Awaitable[None]], max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.max_bytes:
            await self._refuse(send)
            return
        read, is_over, has_begun = 0, False, False

        async def counted() -> Message:
            nonlocal read, is_over
            if is_over:
                return {"type": "http.disconnect"}
            message = await receive()
            read += len(message.get("body", b""))
            is_over = read > self.max_bytes
            # the application gives up as for a client that is gone, and what was read is freed
            return {"type": "http.disconnect"} if is_over else message

        async def unless_over(message: Message) -> None:
            nonlocal has_begun
            if not is_over or has_begun:
                has_begun = True
                await send(message)

        try:
            await self.app(scope, counted, unless_over)
        except Exception:  # whatever it makes of a body that was cut off here
            if not is_over or has_begun:
                raise
        if is_over and not has_begun:
            await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        text = f"the body of the request is larger than {self.max_bytes / 2**20:g} MiB, the most that this server takes"
        body = json.dumps({"error": {"message": text, "type": "BadRequestError", "code": 413}}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),  # the rest of the body is not read
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class KnownMethods:
    """ASGI middleware: status 405 for a method that HTTP does not have. What counts requests by their method would
    keep a counter of each."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in METHODS:
            await self.app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"allow", ", ".join(sorted(METHODS)).encode())]
        await send({"type": "http.response.start", "status": 405, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"detail":"Method Not Allowed"}'})


def counted_path(original: Callable[[Any], tuple[str, bool]], request: Any) -> tuple[str, bool]:
    """AROUND _get_fastapi_request_path, which names the counters of a request: all paths that the server does not have
    share one name. SGLang keeps counters of each, and its `/metrics` takes seconds after some thousand."""
    path, is_known = original(request)
    return (path if is_known else UNKNOWN_PATH), is_known


def no_place(original: Callable[[Any], str], error: Any) -> str:
    """AROUND RequestValidationError._format_endpoint_context: file and line of the function that a request is for,
    which SGLang would tell the client."""
    return ""


def max_body_bytes() -> int | None:
    """The limit that the environment sets. Raises ValueError."""
    text = os.environ.get(VARIABLE, "0")
    if not text.isascii() or not text.isdigit() or int(text) > MAX_MIB:
        raise ValueError(f"{VARIABLE} must be a whole number of MiB up to {MAX_MIB}, 0 for no limit, got {text!r}")
    return int(text) * 2**20 or None


def prepare_app(original: Callable[[Any], None], app: Any) -> None:
    """AROUND add_http_request_metrics_middleware, which every process that serves HTTP calls once, when it makes the
    application. Keys are compared before, by what SGLang adds later."""
    original(app)
    # the name of a parser that there is not, among others; in most of its routes SGLang itself says 400 then
    app.add_exception_handler(ValueError, refuse)
    app.add_exception_handler(TemplateError, refuse)  # messages that the target's chat template refuses
    for kind in UNREADABLE:
        app.add_exception_handler(kind, refuse_unread)
    app.add_middleware(KnownMethods)
    max_bytes = max_body_bytes()
    if max_bytes is not None:
        app.add_middleware(BodyLimit, max_bytes=max_bytes)


async def refuse_unread(request: Any, error: Exception) -> Any:
    """Refuse on the route that makes a request of any JSON it is given; elsewhere it is a fault of the server."""
    if request.url.path != VERTEX_ROUTE:
        raise error
    return await refuse(request, error)


async def refuse(request: Any, error: Exception) -> Any:
    from starlette.responses import JSONResponse

    logger.warning("%s: %s", request.url.path, error, exc_info=error)  # it may be a fault of the server all the same
    return JSONResponse({"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)
