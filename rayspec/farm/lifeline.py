"""Tells a driver that the Ray node which it depends on is lost.

When a driver's raylet has died, Ray ends the driver some seconds later, from C++: without an exception, without a hint
what to do, and with nothing closed. Here the driver learns of the loss at once, while it can still report it and close
what is open.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import ray


class NodeLost(RuntimeError):
    """This machine's Ray node is gone, and with it all that ran on it."""


@contextlib.contextmanager
def node_lost_raises() -> Iterator[None]:
    """NodeLost from the block, in the main thread, as soon as this node's raylet has ended."""
    own = ray.get_runtime_context().get_node_id()
    address = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == own)
    before = signal.signal(signal.SIGUSR1, _interrupt)
    is_over, is_lost = threading.Event(), threading.Event()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)

        def watch() -> None:
            with contextlib.suppress(OSError):
                line.recv(1)  # a raylet says nothing to who does not: this returns once either end is closed
            if not is_over.is_set():
                is_lost.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        watcher = threading.Thread(target=watch, name="lifeline", daemon=True)
        watcher.start()
        try:
            yield
        except BaseException:
            if not is_lost.is_set():
                raise
        finally:
            is_over.set()
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            watcher.join()
            signal.signal(signal.SIGUSR1, before)
    if is_lost.is_set():
        raise NodeLost("this machine's Ray node is gone: its raylet process has ended (out of memory?)")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # the one exception that Ray Tune lets pass whatever it is doing
