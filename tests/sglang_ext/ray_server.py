"""`rayspec serve --replicas 1` in a process of its own: the same surface, behind Ray Serve's proxy and our ingress."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import psutil
from fixture_models import DRAFTERS
from rollover_world import write_champion
from stock_server import KEY, MAX_BODY_MIB, START_TIMEOUT_S, Server, running, wait_until_healthy

from rayspec.serving.access import ADMIN_VARIABLE
from rayspec.serving.process import free_port


class RayServer(Server):
    def processes(self) -> list[psutil.Process]:
        """What a request passes through: Ray's proxy, the ingress, the replica, and the replica's server."""
        found = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                title = " ".join(words)
                is_server = words[1:3] == ["-m", "sglang.launch_server"]
                if is_server or title.startswith(("ray::ProxyActor", "ray::ServeReplica", "sglang::")):
                    found.append(process)
        return found

    def logs(self) -> set[Path]:
        """Of Ray Serve and of the replica's server."""
        opened = [Path(file.path) for process in self.processes() for file in process.open_files()]
        return {path for path in opened if path.suffix in (".log", ".err", ".out")}


@contextmanager
def ray_server(folder: Path) -> Iterator[RayServer]:
    """With an administrator's key and a limit on bodies."""
    write_champion(folder / "champion", DRAFTERS["slimspec"], tau=3.0, flags={})
    port, log = free_port(), folder / "log"
    command = [sys.executable, "-m", "rayspec.cli", "serve", str(folder / "champion"), "--port", str(port)]
    command += ["--replicas", "1", "--no-canary", "--max-body-mib", str(MAX_BODY_MIB)]
    variables = {"RAYSPEC_HOME": str(folder / "home"), ADMIN_VARIABLE: KEY}
    with mock.patch.dict(os.environ, variables), running(command, log) as process:
        wait_until_healthy(process, port, log)
        server = RayServer(port, process.pid)
        yield server
        logs = server.logs()
        assert len(logs) > 3, "they were not found"
        assert not [file for file in (log, *logs) if KEY in file.read_text(errors="replace")]
        process.terminate()
        process.wait(START_TIMEOUT_S)
