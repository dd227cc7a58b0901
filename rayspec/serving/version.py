"""What every server of a version is told, and the server: it verifies the files on its own node and starts SGLang's
server there with the command of `rayspec serve`. Knows no Ray."""

import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rayspec.home import prepared_home, set_login_apart
from rayspec.serving.access import Access
from rayspec.serving.champion import Champion, fetched, find_champion
from rayspec.serving.launch import server_command
from rayspec.serving.logs import sglang_variables
from rayspec.serving.process import LOOPBACK, PORTS, ServerProcess, free_port, is_free
from rayspec.serving.record import RECORD
from rayspec.serving.scale import Scale
from rayspec.tracking import connect
from sglang_ext.fingerprints import file_sha256

LOG, LOGGING = re.compile(r".+-(?P<port>\d+)\.log"), ".logging.json"  # of a server, and how it is to write it
KEPT_LOGS, KEPT_S = 50, 24 * 3600  # the newest so many, and those younger than so many seconds
LONGEST_NAME = 100  # characters of a log's file that are the version's
logger = logging.getLogger("ray.serve")  # whose lines say which replica it is, in text or as JSON


@dataclass(frozen=True, kw_only=True)
class ServedVersion:
    """What every replica of a version is told; `source` never is an alias, which may move meanwhile."""

    name: str
    source: str
    folder: str  # what it is called where a node's home keeps champions
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
    tries_first: bool = False  # its replicas see to the canary themselves: nobody has before


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
        folder=champion.folder.name,
        record_sha256=file_sha256(champion.folder / RECORD),
        target=target,
        force=force,
        follows_policy=follows_policy,
        more=tuple(more),
        num_threads=champion.record.num_threads or _threads(),
        tracking_uri=tracking_uri,
        access=access,
        log_format=log_format,
    )


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What the command line says of the servers, whatever their version. `tries_first`: canary prompts are answered
    before there is traffic."""

    host: str
    port: int
    access: Access
    target: str | None
    force: bool
    follows_policy: bool
    more: tuple[str, ...]
    tracking_uri: str | None  # None for a folder
    scale: Scale = field(default_factory=Scale)
    log_format: str = "text"
    tries_first: bool = True

    def version(self, champion: Champion, source: str) -> ServedVersion:
        return served_version(
            champion,
            source,
            target=self.target,
            force=self.force,
            follows_policy=self.follows_policy,
            more=self.more,
            tracking_uri=self.tracking_uri,
            access=self.access,
            log_format=self.log_format,
        )


def start_server(version: ServedVersion) -> tuple[Champion, ServerProcess]:
    """Start a server on a loopback port of its own; returns once it is healthy. Raises ValueError for files that are
    not what was checked, ServerFailed where it does not start."""
    folder = prepared_home() / "serving"
    delete_old_logs(folder)  # first: they may be what has filled the disk
    champion = _checked(version)
    port = free_port()
    command = server_command(champion, LOOPBACK, port, version.more, follows_policy=version.follows_policy)
    # Ray sets a number of threads for its own workers
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    name = version.name.replace("/", "-").replace(" ", "-")[-LONGEST_NAME:]
    log = folder / f"{name}-{port}.log"
    said: dict[str, str | int] = {"version": version.name, "port": port}
    environment |= sglang_variables(version.log_format, log.with_suffix(LOGGING), said, command)
    server = ServerProcess(
        command,
        port=port,
        environment=version.access.environment(version.num_threads, environment),
        log=log,
        access=version.access,
    )
    logger.info("the server of %s starts on port %d of its node; log: %s", version.name, port, log, extra=said)
    try:
        server.wait_until_healthy(version.start_timeout_s)
    except BaseException:
        server.kill()
        raise
    logger.info("the server of %s is ready on port %d of its node", version.name, port, extra=said)
    return champion, server


def delete_old_logs(folder: Path) -> None:
    """Of servers that have ended, but for the newest and those of the last day: a replica that dies again and again
    would fill its disk. Other nodes may share the folder, whose servers' logs are young."""
    logs = []
    for path in folder.glob("*.log"):
        found = LOG.fullmatch(path.name)
        if found and int(found["port"]) in PORTS:
            with suppress(OSError):  # another server that starts deletes them, too
                logs.append((path.stat().st_mtime, int(found["port"]), path))
    for written, port, path in sorted(logs)[:-KEPT_LOGS]:
        if time.time() - written > KEPT_S and is_free(port):
            with suppress(OSError):
                path.unlink()
                path.with_suffix(LOGGING).unlink()


def _checked(version: ServedVersion) -> Champion:
    source, client = version.source, None
    if version.tracking_uri is not None:
        # MLflow may be away when a replica that died is replaced, so it is asked only for what is not here
        folder = fetched(version.folder, version.record_sha256)
        if folder is None:
            set_login_apart()  # of this node's environment: the address that was handed on has none
            client = connect(version.tracking_uri, create=False)
        else:
            source = str(folder)
    champion = find_champion(source, client, target=version.target, force=version.force)
    if file_sha256(champion.folder / RECORD) != version.record_sha256:
        raise ValueError(
            f"{version.source} on this node is not what was checked when it was put in ({champion.folder / RECORD} "
            "has another fingerprint)"
        )
    return champion


def _threads() -> int | None:
    """What the user gives the server on one machine, too."""
    found = os.environ.get("OMP_NUM_THREADS", "")
    return int(found) if found.isdigit() else None
