"""Real servers for tests: Ray's nodes, PostgreSQL, MLflow's tracking server, a proxy that asks for a login, Chromium.

Each is a context manager that ends what it started. What is not installed skips the test, saying what to install.
"""

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from ray.cluster_utils import Cluster

from rayspec.farm.processes import environment
from rayspec.serving.process import free_port

DROPPED = ("host", "authorization", "transfer-encoding")
START_TIMEOUT_S = 600  # a busy machine imports MLflow for minutes
WITHOUT_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # for which MLflow's server starts six more processes
POSTGRES_ACCOUNT = "nobody"  # PostgreSQL refuses to run as root


def listening(pid: int) -> set[tuple[str, bool]]:
    """(program, whether on the loopback address alone) of every port that a process and its children listen on."""
    root = psutil.Process(pid)
    return {
        (p.name(), c.laddr.ip.removeprefix("::ffff:").startswith("127.") or c.laddr.ip == "::1")
        for p in [root, *root.children(recursive=True)]
        for c in p.net_connections()
        if c.status == psutil.CONN_LISTEN
    }


@contextlib.contextmanager
def two_ray_nodes() -> Iterator[tuple[dict[str, str], list[Any]]]:
    """A cluster of a head without CPUs and two nodes with two each; yields the environment of its jobs, and the nodes.

    A process that has imported Ray no longer learns a token; everything here is on the loopback address.
    """
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}  # which starve else beside other tests
    with environment(variables):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
            yield {**variables, "RAY_ADDRESS": cluster.address}, nodes
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def ray_head(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """`ray start --head` of a cluster of one node on ports of its own, with its log in `folder`; yields the dashboard's
    address, which takes jobs, and the variables that name its token to whoever submits them."""
    port, programs = free_port(), Path(sys.executable).parent
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = [str(programs / "ray"), "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=2"]
    command += [f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
    # the agent takes jobs; its port is the same for all heads of a machine otherwise
    command += [f"--dashboard-agent-listen-port={free_port()}"]
    short = f"/tmp/rs{os.getpid()}"  # because Ray's socket paths are limited to 107 characters
    command += [f"--temp-dir={short}"]
    # Ray's workers are nice by default, and starve beside the other tests; nobody would use those that it starts ahead
    settings = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    variables = {**os.environ, **token, **settings, "PATH": f"{programs}:{os.environ['PATH']}"}
    log = folder / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd="/tmp"
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert head.poll() is None, log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", token
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(short, ignore_errors=True)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A new cluster with an empty database; yields its address for SQLAlchemy."""
    pytest.importorskip("psycopg", reason="needs psycopg (pip install 'psycopg[binary]')")
    programs, port = _postgres_programs(), free_port()
    with tempfile.TemporaryDirectory(prefix="rayspec-pg-") as name:  # pytest's folders are closed to other accounts
        folder, as_user = Path(name), []
        if os.getuid() == 0:
            as_user = ["runuser", "-u", POSTGRES_ACCOUNT, "--"]
            shutil.chown(folder, POSTGRES_ACCOUNT)
        data = ["-D", str(folder / "data")]
        # durability is not tested, and a busy disk would make every commit wait
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        _run([*as_user, str(programs / "initdb"), *data, "-U", "rayspec", "--auth=trust", "-E", "UTF8"], folder)
        pg_ctl = [*as_user, str(programs / "pg_ctl"), *data, "-w", "-t", str(START_TIMEOUT_S)]
        _run([*pg_ctl, "-l", str(folder / "log"), "-o", options, "start"], folder)
        try:
            yield f"postgresql+psycopg://rayspec@127.0.0.1:{port}/postgres"
        finally:
            _run([*pg_ctl, "-m", "immediate", "stop"], folder)


def _postgres_programs() -> Path:
    found = [Path(p).parent for p in (shutil.which("initdb"), shutil.which("pg_ctl")) if p]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    for folder in found:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    pytest.skip("needs PostgreSQL's server programs (Debian package postgresql)")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


@contextlib.contextmanager
def mlflow_server(store: str, folder: Path, **variables: str) -> Iterator[str]:
    """MLflow's own server in front of a database, with artifacts in `folder`; yields its address."""
    port = free_port()
    process = start_mlflow(store, folder, port, **variables)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=60)


def start_mlflow(store: str, folder: Path, port: int, **variables: str) -> subprocess.Popen[bytes]:
    """The same as a process that leads its group, once it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--artifacts-destination", str(folder / "artifacts"), "--port", str(port), "--workers", "1"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | WITHOUT_JOBS | {"MLFLOW_DISABLE_TELEMETRY": "true"} | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    _wait_until_healthy(f"http://127.0.0.1:{port}", process, folder / "server.log")
    return process


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), urlopen(f"{address}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"the MLflow server did not answer within {START_TIMEOUT_S} s:\n{log.read_text()}")


@contextlib.contextmanager
def login_proxy(address: str, authorization: set[str]) -> Iterator[str]:
    """A proxy before `address` that lets only these Authorization headers through; yields its address."""
    upstream = urlsplit(address)
    assert upstream.hostname is not None, "an address has a host"

    class Handler(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            body = self._body()
            if self.headers.get("Authorization") not in authorization:
                self._answer(401, b"who are you?")
                return
            connection = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=60)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in DROPPED}
            connection.request(self.command, self.path, body, headers | {"Host": upstream.netloc})
            answer = connection.getresponse()
            self._answer(answer.status, answer.read(), answer.getheader("Content-Type"))
            connection.close()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            chunks = []  # how requests sends a file without content
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _answer(self, status: int, body: bytes, kind: str | None = "text/plain") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind or "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def chromium(profile: Path, width: int = 1500, height: int = 1000) -> Iterator[Any]:
    """A selenium driver of headless Chromium with a new profile."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium (pip install selenium)")
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not browser or not driver:
        pytest.skip("needs Chromium and its driver (Debian packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (
        "--headless",
        "--no-sandbox",  # root has no other way, and the pages are our own
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(flag)
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    page.set_page_load_timeout(START_TIMEOUT_S)
    try:
        yield page
    finally:
        page.quit()
