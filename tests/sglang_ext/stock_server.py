"""SGLang's own server in a process of its own, as a user starts it, and one with what `rayspec serve` adds."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from fixture_models import DRAFTERS, TARGET
from hostile_requests import Hostile

from rayspec.serving.process import free_port
from sglang_ext.adapter.http_app import VARIABLE

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 600
TIMEOUT_S = 60
KEY, MAX_BODY_MIB = "battery-staple", 1


SPECULATIVE = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "4"]
SHAPES = {
    1: ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5"],
    4: ["--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "12"],
}


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen]:
    with log.open("w") as output:
        # a process group of its own, so that its scheduler and detokenizer end with it
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server_process(port: int, log: Path, *flags: str) -> AbstractContextManager[subprocess.Popen]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port), *flags]
    return running(command, log)


def post(port: int, route: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def wait_until_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


class Server:
    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.process = psutil.Process(pid)
        self.pids = {p.pid for p in self.processes()}

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def memory_mib(self) -> float:
        return sum(p.memory_info().rss for p in self.processes()) / 2**20

    def open_files(self) -> int:
        return sum(p.num_fds() for p in self.processes())

    def ask(self, request: Hostile) -> tuple[int, str]:
        body = request.body
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{request.route}",
            data,
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
            method=request.method,
        )
        try:
            with urllib.request.urlopen(sent, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def text(self, prompt: str, **more: Any) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 12, **more}
        return post(self.port, "/generate", {"text": prompt, "sampling_params": sampling})["text"]

    def says_what_it_should(self, request: Hostile) -> str | None:
        """None, or what it said instead."""
        status, text = self.ask(request)
        fits = 400 <= status < 500 if request.status is None else status == request.status
        fits = fits and request.says in text and not tells_of_itself(text)
        return None if fits and text else f"{request.name}: {status} {text}"


def tells_of_itself(text: str) -> bool:
    """Whether an error shows a client what is none of its business."""
    return any(word in text for word in ("Traceback", "site-packages", ".py", str(ROOT), KEY))


@contextmanager
def limited_server(folder: Path, *, speculates: bool = True) -> Iterator[Server]:
    """With an administrator's key, a limit on bodies, one on the queue, and counters."""
    port, log = free_port(), folder / "log"
    drafter = [*SPECULATIVE, *SHAPES[1], "--speculative-draft-model-path", str(DRAFTERS["slimspec"])]
    own = ["--admin-api-key", KEY, "--max-queued-requests", "4096", "--enable-metrics"]
    with (
        mock.patch.dict(os.environ, {VARIABLE: str(MAX_BODY_MIB)}),
        server_process(port, log, *own, *(drafter if speculates else [])) as process,
    ):
        wait_until_healthy(process, port, log)
        yield Server(port, process.pid)
        assert KEY not in log.read_text()
