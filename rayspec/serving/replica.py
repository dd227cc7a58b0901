"""One server of a champion in a Ray actor, as a replica of Ray Serve, which ends with it.

A replica whose server has died says so to running and new requests, and then ends itself: so Ray Serve's routers learn
at once that it is gone, and its controller starts another.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import httpx

from rayspec.serving.canary import Answer
from rayspec.serving.canary_actor import outages_postpone
from rayspec.serving.canary_server import answers_of, try_version
from rayspec.serving.figures import Totals, read_totals
from rayspec.serving.process import HEALTH_TIMEOUT_S, STOP_TIMEOUT_S, ServerFailed
from rayspec.serving.relay import Message, Passed, ReplicaGone, Taken, relay
from rayspec.serving.scrape import Told
from rayspec.serving.version import ServedVersion, logger, start_server

WATCH_S = 0.5
TOTALS_EVERY_S = 2.0
FAREWELL_S = 1.0  # for the errors of running requests to leave a replica whose server has died
CONNECT_TIMEOUT_S = 10.0
METRICS_TIMEOUT_S = 5.0  # well below what the ingress waits for all replicas: one that hangs holds up no other
FAILED_CHECKS = 3  # Ray Serve's own limit, which cannot be set
DIED = 70  # exit status of a replica whose server has died


class Replica:
    """What runs in the actor. `board` (an actor, see `board.py`) is told of the server's counters."""

    def __init__(self, version: ServedVersion, board: Any = None) -> None:
        self._version, self._board = version, board
        self._name = uuid4().hex  # for the board: in containers many replicas have the same process id
        self._totals = Totals()
        self._failed_checks = 0  # in a row
        self._is_stopping = False
        with outages_postpone():
            if version.tries_first:
                try_version(version)
            self.champion, self.server = start_server(version)
        self._client = httpx.AsyncClient(
            base_url=self.server.address,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        threading.Thread(target=self._watch, name="server watch", daemon=True).start()

    async def relay(self, passed: Passed) -> AsyncIterator[Message]:
        """Hand a request to the server: Taken, then ResponseHead and the body's parts, or ReplicaGone."""
        if not self.server.is_alive:
            yield Taken()
            yield ReplicaGone(reason="the server of this replica has ended; send the request again", was_read=False)
            return
        async for message in relay(self._client, passed):
            yield message

    async def canary_answers(self, told: Any = None) -> list[Answer]:
        """Answers to the canary prompts. `told`: what a router reads of the call."""
        return await asyncio.to_thread(answers_of, self.server, self.champion.target, self._version)

    async def check_health(self) -> None:
        """Ray Serve ends the replica after this has raised FAILED_CHECKS times in a row."""
        if not self.server.is_alive:
            raise ServerFailed("SGLang's server has ended")
        self._failed_checks += 1  # until it has answered
        try:
            response = await self._client.get("/health", timeout=HEALTH_TIMEOUT_S)
            if response.status_code != 200:
                raise ServerFailed(f"SGLang's /health answered {response.status_code}")
            self._failed_checks = 0
        finally:
            if self._failed_checks >= FAILED_CHECKS:
                self._tell()

    def source(self, told: Any = None) -> str:
        """Which version it serves; `told`: see `canary_answers`."""
        return self._version.source

    async def metrics(self) -> Told:
        """Raises ServerFailed where its server tells none."""
        response = await self._client.get("/metrics", timeout=METRICS_TIMEOUT_S)
        if response.status_code != 200:
            raise ServerFailed(f"SGLang's /metrics answered {response.status_code}")
        return Told(self._name, self._version.name, response.text)

    def stop(self) -> None:
        """End the server once what runs has ended. May be called twice."""
        self._is_stopping = True
        self.server.stop(STOP_TIMEOUT_S)

    def _watch(self) -> None:
        told = 0.0
        while self.server.is_alive:
            if time.monotonic() - told > TOTALS_EVERY_S:
                told = time.monotonic()
                self._count()
                self._tell()
                with suppress(OSError):  # a disk that is full
                    self.server.shorten_log()
            time.sleep(WATCH_S)
        if self._is_stopping:
            return
        name = self._version.name
        logger.error("the server of %s has died; its log is %s", name, self.server.log, extra={"version": name})
        self._tell()
        self.server.kill()  # what it left behind
        time.sleep(FAREWELL_S)
        os._exit(DIED)

    def _count(self) -> None:
        with suppress(httpx.HTTPError, ValueError):  # of a server that is ill, what was counted before
            told = httpx.get(f"{self.server.address}/metrics", timeout=HEALTH_TIMEOUT_S, trust_env=False)
            self._totals = read_totals(told.raise_for_status().text)

    def _tell(self) -> None:
        has_died = self._failed_checks >= FAILED_CHECKS or not (self.server.is_alive or self._is_stopping)
        if self._board is not None:
            with suppress(Exception):  # a driver that has gone has taken the board with it
                self._board.put.remote(self._version.name, self._name, replace(self._totals, deaths=float(has_died)))
