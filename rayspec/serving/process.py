"""SGLang's server as the child of a process that may die: gone with its parent however that ends, and its keys with it
(`tethered`); for a replica on a loopback port of its own, with its log (`ServerProcess`)."""

import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from rayspec.messages import log_end, log_tail
from rayspec.serving.access import Access

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 30_000)  # above those of Ray's workers, below the default of `rayspec serve`
POLL_S = 0.5
HEALTH_TIMEOUT_S = 25.0  # SGLang itself waits 20 s for a token
STOP_TIMEOUT_S = 60.0
MAX_LOG_BYTES, KEPT_LOG_BYTES = 64 * 2**20, 16 * 2**20
# The shell becomes the server and leads its group; what it leaves behind waits for the end of our pipe, which the
# kernel closes with us, and then removes the keys ($0) and ends the group: SGLang's scheduler outlives a server that
# was killed. It is a grandchild, since a server that stops kills its children.
TETHER = 'exec 3<&0 </dev/null; ( { read -r word <&3; rm -rf "$0"; kill -9 -$$; } & ); exec "$@" 3<&-'


KILLED = re.compile(r"(?:exit code:?|with code|terminated with) -9\b")  # what SGLang says of a process of its own
PORT_TAKEN = re.compile("address already in use", re.IGNORECASE)
# SGLang kills itself after any error, so that only a kill without one is the kernel's: a traceback, a fatal signal in
# one of its processes, or its word for both
OWN_ERROR = re.compile(r"Traceback|Fatal Python error|SIGQUIT|exit code:? -(?!9\b)\d", re.IGNORECASE)
ERRORS = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+", re.MULTILINE)  # the last lines of tracebacks


class ServerFailed(RuntimeError):
    """The server did not start, or has ended; the message holds the end of its log."""


class ServerTakenAway(ServerFailed):
    """The same for a reason that lies outside of the server, which the first line of the message says."""


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of the loopback address."""
    with suppress(OSError), socket.socket() as s:
        s.bind((LOOPBACK, port))
        return True
    return False


def free_port() -> int:
    """A port of the loopback address that nobody listened on a moment ago. Not one of those that systems hand to
    outgoing connections (Linux from 32768), which could be gone before a server listens that starts for seconds. Raises
    OSError."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if is_free(port):
            return port
    raise OSError(f"no port of {LOOPBACK} from {PORTS[0]} to {PORTS[-1]} is free")


@contextmanager
def tethered(
    command: Sequence[str], access: Access, environment: Mapping[str, str], output: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The server as a process in a session of its own; when the block ends, or this process, so does every process
    that it started. `output`: what takes its output; None: ours."""
    with access.with_keys(command) as (words, own):
        counters = own / "metrics"  # files that SGLang would leave behind where it is killed
        counters.mkdir()
        process = subprocess.Popen(
            ["sh", "-c", TETHER, str(own), *words],
            env={"PROMETHEUS_MULTIPROC_DIR": str(counters), **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        assert process.stdin is not None, "it is a pipe"
        try:
            yield process
        finally:
            process.stdin.close()  # the tether ends the group
            process.wait()


def failure(what: str, log: Path, *, was_killed: bool = False) -> ServerFailed:
    """The error of a server of which `what` is to be said, with the end of its log."""
    text = log_end(log)
    tail = f"--- end of {log} ---\n{log_tail(log)}"
    errors = ERRORS.findall(text)
    last = errors[-1] if errors else ""
    if PORT_TAKEN.search(last or text):
        return ServerTakenAway(f"{what}: another process has taken its port\n{tail}")
    if KILLED.search(last or text) or (was_killed and not OWN_ERROR.search(text)):
        return ServerTakenAway(f"{what}: it was killed, as for want of memory\n{tail}")
    return ServerFailed(f"{what}{f': {last}' if last else ''}\n{tail}")


class ServerProcess:
    """A server that was started. Knows no Ray."""

    def __init__(
        self, command: Sequence[str], *, port: int, environment: Mapping[str, str], log: Path, access: Access
    ) -> None:
        self.address = f"http://{LOOPBACK}:{port}"
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._until_killed = ExitStack()
        with log.open("ab") as output:
            self._process = self._until_killed.enter_context(tethered(command, access, environment, output))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether it has ended by SIGKILL."""
        return self._process.poll() == -signal.SIGKILL

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Raises ServerFailed where it ends before, or is not healthy after `timeout_s`; it is stopped then."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.address}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False).status_code == 200:
                    return
            time.sleep(POLL_S)
        what = f"was not healthy after {timeout_s:g} s" if self.is_alive else f"ended ({self._ended()})"
        was_killed = self.was_killed
        self.kill()
        raise failure(f"SGLang's server {what}", self.log, was_killed=was_killed)

    def shorten_log(self) -> None:
        """Of a log that is larger than MAX_LOG_BYTES keep the end. The server appends, so that it goes on behind that;
        what it writes meanwhile may be lost."""
        if not self.log.is_file() or self.log.stat().st_size <= MAX_LOG_BYTES:
            return
        with self.log.open("r+b") as log:
            log.seek(-KEPT_LOG_BYTES, os.SEEK_END)
            end = log.read()
            log.truncate(0)
            log.seek(0)
            log.write(end)

    def stop(self, timeout_s: float) -> None:
        """Let it end by itself (SIGTERM: SGLang answers what runs), then end what is left. May be called twice."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End it and every process that it started, at once. May be called twice."""
        self._until_killed.close()

    def _ended(self) -> str:
        status = self._process.poll() or 0
        return f"signal {-status}" if status < 0 else f"status {status}"
