"""The engine's processes as forks of one that has imported SGLang, which each would otherwise import: 10 CPU seconds.

A server process imports SGLang and does nothing else, so that it has one thread and holds no lock. Forks of it are
safe, which those of the engine's own process would not be. A fork's parent ends at once, and the fork goes to the
engine's process, which asked the kernel for such orphans (Linux: PR_SET_CHILD_SUBREAPER). So it is what a spawned
process would be: a child of the engine's process, with its environment, folder and output, which it can wait for and
signal, and which learns of its death. Not where there is an accelerator: CUDA does not survive a fork.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, popen_fork, popen_forkserver, process, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any

from setproctitle import setproctitle

from sglang_ext.adapter.cpu.imports import quick_imports
from sglang_ext.adapter.internals import ENGINE_PROCESSES, PRELOADED
from sglang_ext.adapter.patches import lent

# differ from engine to engine, and are read by nothing that is imported; any other one asks for a new server
OWN_VARIABLES = (
    *("SGLANG_RUN_ID", "PROMETHEUS_MULTIPROC_DIR", "SGLANG_CPU_OMP_THREADS_BIND", "NCCL_GRAPH_REGISTER"),
    "PYTEST_CURRENT_TEST",
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_FDS = 64
ADOPTION_TIMEOUT_S = 10.0


def serve(fd: int) -> None:
    """Import SGLang, then fork for each message on this socket, until its other end is closed or its owner ends."""
    owner = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    setproctitle("rayspec::fork_server")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C is its owner's to report
    with quick_imports(skip=True):
        from sglang.srt.plugins import load_plugins

        load_plugins()  # which say what the modules below find
        for name in PRELOADED:
            importlib.import_module(name)
        from sglang.srt.models.registry import ModelRegistry

        logging.disable(logging.WARNING)  # of each model that this machine has not the libraries for
        ModelRegistry.get_supported_archs()  # imports all models, among which each engine looks for its target's
        logging.disable(logging.NOTSET)
        gc.freeze()  # so that collections of the forks do not copy its pages
    with socket.socket(fileno=fd) as line:
        while True:
            message, fds, _, _ = socket.recv_fds(line, 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            _fork(owner, line, fds)
            for received in fds:
                os.close(received)


def _fork(owner: int, line: socket.socket, fds: list[int]) -> None:
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    if os.fork():
        os._exit(0)
    code = 1
    try:
        line.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = _run(owner, *fds)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(owner: int, data: int, status: int, out: int, err: int, tracker: int, *inherited: int) -> int:
    """The fork's life. It keeps `status` open until its end, which tells its owner of it."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != owner:  # SGLang's processes ask who their parent is
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {owner}, which asked for this one, is not its parent")
        time.sleep(0.001)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    forkserver._forkserver._inherited_fds = list(inherited)  # type: ignore[attr-defined]
    forkserver.write_signed(status, os.getpid())
    return spawn._main(data, os.dup(data))


class ForkServer:
    """A server process. What is imported can depend on the environment: it `serves` only the one that it started in."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._line, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            command = [spawn.get_executable(), *flags, "-c", code]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def serves(self) -> bool:
        """Whether it runs in the environment of this process."""
        here, there = ({k: v for k, v in e.items() if k not in OWN_VARIABLES} for e in (os.environ, self.environment))
        return here == there

    def fork(self, fds: list[int]) -> None:
        """Let it fork a process with these open files; see `_run`."""
        socket.send_fds(self._line, [b"f"], fds)

    def close(self) -> None:
        self._line.close()
        self.process.wait()


class _Popen(popen_forkserver.Popen):
    """How multiprocessing starts a process and looks after it, which is its child."""

    _fds: list[int]  # that the process object holds
    poll = popen_fork.Popen.poll

    def _launch(self, process_obj: Any) -> None:
        child, setup = io.BytesIO(), io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(process_obj, child)
            preparation = spawn.get_preparation_data(process_obj._name)
            if b"__main__" not in child.getvalue():  # nothing of the main module is needed, which would be run again
                preparation = {k: v for k, v in preparation.items() if not k.startswith("init_main_")}
            reduction.dump(preparation, setup)
        finally:
            set_spawning_popen(None)
        server = _server_of_now()
        tracker = resource_tracker.getfd()
        assert tracker is not None, "getfd starts the tracker"
        self.sentinel, status = os.pipe()
        data, write = os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, write))  # type: ignore[attr-defined]
        try:
            with _adopting_orphans():
                server.fork([data, status, 1, 2, tracker, *self._fds])
                os.close(status)
                self.pid = forkserver.read_signed(self.sentinel)
        except (OSError, EOFError) as error:
            raise RuntimeError("the process that imports SGLang for its others ended; its output says why") from error
        finally:
            os.close(data)
        with open(write, "wb", closefd=False) as file:
            file.write(setup.getvalue() + child.getvalue())


class ForkedProcess(SpawnProcess):
    """A process of multiprocessing in the environment of its start."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        super().run()

    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> Any:
        return _Popen(process_obj)


class ForkingContext(SpawnContext):
    """What SGLang's engine finds as `multiprocessing`."""

    Process = ForkedProcess

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        multiprocessing.set_start_method(method, force)


_servers: list[ForkServer] = []  # each of another environment; the one that was asked last is the last
stays = False  # whether they outlive an engine's start: for a process that starts many, one after another


def _server_of_now() -> ForkServer:
    for ended in [server for server in _servers if server.process.poll() is not None]:
        _servers.remove(ended)
        ended.close()
    server = next((server for server in _servers if server.serves()), None)
    if server is None:
        server = ForkServer()
    else:
        _servers.remove(server)
    _servers.append(server)
    return server


def pid() -> int | None:
    """Process id of the server that was asked last; None if there is none."""
    return _servers[-1].process.pid if _servers else None


def close() -> None:
    """End the servers."""
    while _servers:
        _servers.pop().close()


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Children of this process's descendants that end become its own."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def launch_by_forks(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """AROUND Engine._launch_subprocesses."""
    # ranks are bound to cores by variables that OpenMP reads when it is loaded: SGLang's own way for them
    if not sys.platform.startswith("linux") or options["server_args"].tp_size > 1:
        return original(*arguments, **options)
    with lent(ENGINE_PROCESSES, ForkingContext()):
        try:
            return original(*arguments, **options)
        finally:
            if not stays:
                close()
