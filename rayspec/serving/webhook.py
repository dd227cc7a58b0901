"""MLflow's webhook: a notice that the alias has moved, so that it is looked at now and not at the next poll.

A notice says only *when* to look. Which version is meant is read from the registry in any case, so that whoever could
forge one would cause a look and nothing else. Still each is checked: its signature, which MLflow makes with the secret
of the webhook (HMAC-SHA256 of `id.time.body`, after https://www.standardwebhooks.com), its age, and that it is new.
"""

import base64
import hashlib
import hmac
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from mlflow.webhooks.constants import (
    WEBHOOK_DELIVERY_ID_HEADER,
    WEBHOOK_SIGNATURE_HEADER,
    WEBHOOK_SIGNATURE_VERSION,
    WEBHOOK_TIMESTAMP_HEADER,
)
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rayspec.serving.access import WEBHOOK_VARIABLE, check_address
from rayspec.serving.relay import body_of

PATH = "/webhook"
UNIX_TIME = re.compile(r"[0-9]{1,15}")
EVENT = ("model_version_alias", "created")  # also where an alias that was there is moved
MAX_AGE_S = 300.0  # either way: clocks differ, and MLflow sends again for some seconds
MAX_BODY_BYTES = 64 * 1024
MAX_CONNECTIONS = 64
IDLE_S = 5
STOP_TIMEOUT_S = 10.0
MIN_SECRET = 16

Headers = Mapping[str, str]


class Unsigned(Exception):
    """MLflow has not sent this, or not now; the message says why and may be told to anybody."""


@dataclass(frozen=True, kw_only=True)
class WebhookSettings:
    """Where notices are taken, and the secret that MLflow signs them with."""

    host: str
    port: int
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_address(self.host, self.port, "webhook-")
        if len(self.secret) < MIN_SECRET:
            raise ValueError(
                f"--webhook-port needs the secret of MLflow's webhook in {WEBHOOK_VARIABLE}, of at least "
                f"{MIN_SECRET} characters (openssl rand -hex 32), since anybody could send notices without one"
            )

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{PATH}"


class Notices:
    """Which notices are MLflow's, new, and about one alias. Knows no HTTP."""

    def __init__(self, secret: str, model: str, alias: str, *, clock: Callable[[], float] = time.time) -> None:
        self._secret, self._about, self._clock = secret.encode(), {"name": model, "alias": alias}, clock
        self._taken: dict[str, float] = {}  # ids of those whose age would still do, and when they came

    def is_news(self, headers: Headers, body: bytes) -> bool:
        """Whether the alias may have moved: False for what is about something else, and for what came before.

        Raises Unsigned for a signature that is not of our secret, and for one that is older than MAX_AGE_S.
        """
        delivery, sent = headers.get(WEBHOOK_DELIVERY_ID_HEADER, ""), headers.get(WEBHOOK_TIMESTAMP_HEADER, "")
        expected = signature(self._secret, delivery, sent, body)
        # in constant time: how long a comparison takes must not say how much of a guess is right
        if not hmac.compare_digest(headers.get(WEBHOOK_SIGNATURE_HEADER, "").encode(), expected.encode()):
            raise Unsigned(f"the signature is not of the secret in {WEBHOOK_VARIABLE}")
        now = self._clock()
        if not UNIX_TIME.fullmatch(sent) or abs(now - int(sent)) > MAX_AGE_S:
            raise Unsigned(f"it is not of the last {MAX_AGE_S:g} s; the clocks of both machines must agree")
        self._taken = {name: at for name, at in self._taken.items() if now - at <= 2 * MAX_AGE_S}
        if delivery in self._taken:  # MLflow sends again what it saw no answer to
            return False
        self._taken[delivery] = now
        return self._is_about_alias(body)

    def _is_about_alias(self, body: bytes) -> bool:
        try:
            notice = json.loads(body)
            return (notice["entity"], notice["action"]) == EVENT and self._about.items() <= notice["data"].items()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Unsigned("it is no notice of MLflow 3") from error


def signature(secret: bytes, delivery: str, sent: str, body: bytes) -> str:
    digest = hmac.new(secret, f"{delivery}.{sent}.".encode() + body, hashlib.sha256).digest()
    return f"{WEBHOOK_SIGNATURE_VERSION},{base64.b64encode(digest).decode()}"


@contextmanager
def receiving(settings: WebhookSettings, alias: tuple[str, str]) -> Iterator[Callable[[float], object]]:
    """Take notices about (model, alias) while the block lasts. Yields what waits for the next one, at most so many
    seconds. Raises ValueError where the address cannot be had."""
    news = threading.Event()
    listener = _listener(settings)
    config = uvicorn.Config(
        _application(Notices(settings.secret, *alias), news.set),
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_S,
        server_header=False,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="webhook", daemon=True)
    thread.start()

    def wait(timeout_s: float) -> None:
        news.wait(timeout_s)
        news.clear()  # before the look that follows, so that what comes during it leads to another

    try:
        yield wait
    finally:
        server.should_exit = True
        thread.join(STOP_TIMEOUT_S)
        listener.close()


def _listener(settings: WebhookSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise ValueError(
            f"notices cannot be taken at --webhook-host {settings.host}, --webhook-port {settings.port} "
            f"({error.strerror or error}); name an address of this machine and a port that is free"
        ) from error


def _application(notices: Notices, tell: Callable[[], None]) -> Starlette:
    async def take(request: Request) -> Response:
        try:
            body = await body_of(request.stream(), MAX_BODY_BYTES)
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        if body is None:
            return JSONResponse({"error": f"a notice may have {MAX_BODY_BYTES} bytes"}, 413, {"Connection": "close"})
        try:
            is_news = notices.is_news(request.headers, body)
        except Unsigned as error:
            return JSONResponse({"error": str(error)}, 401)
        if is_news:
            tell()
        return JSONResponse({"is_news": is_news})

    return Starlette(routes=[Route(PATH, take, methods=["POST"])])
