"""One server of a champion in a Ray actor, as a replica of Ray Serve or as the canary beside them: it verifies the
files on its own node, starts SGLang's server there with the command of `rayspec serve`, and ends with it.

A replica whose server has died says so to what runs and comes, and then ends itself: so Ray Serve's routers learn at
once that it is gone, and its controller starts another.
"""

import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from rayspec.home import prepared_home
from rayspec.serving.access import Access
from rayspec.serving.canary import Answer, read_answer, requests
from rayspec.serving.champion import Champion, find_champion
from rayspec.serving.figures import read_totals
from rayspec.serving.launch import server_command
from rayspec.serving.logs import sglang_variables
from rayspec.serving.process import HEALTH_TIMEOUT_S, LOOPBACK, ServerFailed, ServerProcess, free_port
from rayspec.serving.record import RECORD
from rayspec.serving.relay import Gone, Message, Passed, Taken, relay
from rayspec.tracking import connect
from sglang_ext.fingerprints import file_sha256

logger = logging.getLogger("ray.serve")  # whose lines say which replica it is, in text or as JSON
WATCH_S = 0.5
TOTALS_EVERY_S = 2.0
FAREWELL_S = 1.0  # for the errors of running requests to leave a replica whose server has died
STOP_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
DIED = 70  # exit status of a replica whose server has died


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """What every replica of a version is told; `source` never is an alias, which may move meanwhile."""

    name: str
    source: str
    record_sha256: str  # of its serving.json: what the driver has checked, and every node must find
    target: str | None
    force: bool
    follows_policy: bool
    more: tuple[str, ...]  # words for SGLang's server
    num_threads: int | None
    tracking_uri: str | None = field(repr=False)  # None for a folder, which MLflow is not asked for
    access: Access
    log_format: str = "text"  # of its server's log
    start_timeout_s: float = 1800.0


def served_version(
    champion: Champion,
    source: str,
    *,
    target: str | None,
    force: bool,
    follows_policy: bool,
    more: Sequence[str],
    tracking_uri: str | None,
    access: Access,
    log_format: str = "text",
) -> ServedVersion:
    return ServedVersion(
        name=champion.name,
        source=source,
        record_sha256=file_sha256(champion.folder / RECORD),
        target=target,
        force=force,
        follows_policy=follows_policy,
        # tau and times under traffic are read there
        more=(*more, *(() if "--enable-metrics" in more else ("--enable-metrics",))),
        num_threads=champion.record.num_threads or _threads(),
        tracking_uri=tracking_uri,
        access=access,
        log_format=log_format,
    )


class Replica:
    """What runs in the actor. `board` (an actor, see `board.py`) is told of the server's counters."""

    def __init__(self, version: ServedVersion, board: Any = None) -> None:
        self._version, self._board = version, board
        self._is_stopping = False
        self.champion = self._checked()
        port = free_port()
        command = server_command(self.champion, LOOPBACK, port, version.more, follows_policy=version.follows_policy)
        # Ray sets a number of threads for its own workers
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        log = prepared_home() / "serving" / f"{version.name.replace('/', '-').replace(' ', '-')}-{port}.log"
        said: dict[str, str | int] = {"version": version.name, "port": port}
        environment |= sglang_variables(version.log_format, log.with_suffix(".logging.json"), said, command)
        self.server = ServerProcess(
            command,
            port=port,
            environment=version.access.environment(version.num_threads, environment),
            log=log,
            access=version.access,
        )
        logger.info("the server of %s starts on port %d of its node; log: %s", version.name, port, log, extra=said)
        self.server.wait_until_healthy(version.start_timeout_s)
        logger.info("the server of %s is ready on port %d of its node", version.name, port, extra=said)
        self._client = httpx.AsyncClient(
            base_url=self.server.address,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        threading.Thread(target=self._watch, name="server watch", daemon=True).start()

    async def relay(self, passed: Passed) -> AsyncIterator[Message]:
        """Hand a request to the server: Taken, then Head and the body's parts, or Gone."""
        if not self.server.is_alive:
            yield Taken()
            yield Gone(reason="the server of this replica has ended; send the request again")
            return
        async for message in relay(self._client, passed):
            yield message

    async def canary_answers(self, told: Any = None) -> list[Answer]:
        """To the canary prompts, one after the other: rounding depends on what shares a batch. `told`: what a router
        reads of the call."""
        headers = {} if self._version.access.key is None else {"Authorization": f"Bearer {self._version.access.key}"}
        answers = []
        for body in requests(_tokenizer(self.champion.target)):
            response = await self._client.post("/generate", json=body, headers=headers)
            if response.status_code != 200:
                raise ServerFailed(
                    f"a canary prompt was refused with status {response.status_code}: {response.text[:300]}"
                )
            answers.append(read_answer(response.json()))
        return answers

    async def check_health(self) -> None:
        """Ray Serve replaces the replica after this has raised three times."""
        if not self.server.is_alive:
            raise ServerFailed("SGLang's server has ended")
        response = await self._client.get("/health", timeout=HEALTH_TIMEOUT_S)
        if response.status_code != 200:
            raise ServerFailed(f"SGLang's /health answered {response.status_code}")

    def source(self, told: Any = None) -> str:
        """Which version it serves; `told`: see `canary_answers`."""
        return self._version.source

    def pids(self) -> tuple[int, int]:
        """(of this actor, of its server)."""
        return os.getpid(), self.server.pid

    def stop(self) -> None:
        """End the server once what runs has ended. May be called twice."""
        self._is_stopping = True
        self.server.stop(STOP_TIMEOUT_S)

    def _checked(self) -> Champion:
        version = self._version
        client = None if version.tracking_uri is None else connect(version.tracking_uri, create=False)
        champion = find_champion(version.source, client, target=version.target, force=version.force)
        if file_sha256(champion.folder / RECORD) != version.record_sha256:
            raise ValueError(
                f"{version.source} on this node is not what was checked when it was put in ({champion.folder / RECORD} "
                "has another fingerprint)"
            )
        return champion

    def _watch(self) -> None:
        told = 0.0
        while self.server.is_alive:
            if self._board is not None and time.monotonic() - told > TOTALS_EVERY_S:
                told = time.monotonic()
                self._tell()
            time.sleep(WATCH_S)
        if self._is_stopping:
            return
        name = self._version.name
        logger.error("the server of %s has died; its log is %s", name, self.server.log, extra={"version": name})
        self.server.kill()  # what it left behind
        time.sleep(FAREWELL_S)
        os._exit(DIED)

    def _tell(self) -> None:
        with suppress(Exception):  # a driver that has gone has taken the board with it
            text = httpx.get(f"{self.server.address}/metrics", timeout=HEALTH_TIMEOUT_S, trust_env=False).text
            self._board.put.remote(self._version.name, os.getpid(), read_totals(text))


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def _threads() -> int | None:
    """What the user gives the server on one machine, too."""
    found = os.environ.get("OMP_NUM_THREADS", "")
    return int(found) if found.isdigit() else None
