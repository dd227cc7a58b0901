"""What the jobs set up before anything else; imports nothing that takes time."""

import logging
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from rayspec.disk import is_full
from rayspec.home import set_login_apart

INTERRUPTED = 128 + signal.SIGINT  # what a shell says of it


def set_up() -> None:
    """Warnings in one form, SIGTERM (`ray job stop`) as an exception, so that runs and engines are ended, and no
    password in an address."""
    try:
        set_login_apart()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # torch looks for a CUDA toolkit when SGLang is imported; a machine without GPU needs no warning about it
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # it warns at every retry; that a server is gone is reported by us
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    signal.signal(signal.SIGTERM, _terminate)


def problem(error: Exception) -> str:
    """What a job that cannot go on says of the cause; of a disk that is full with the way out."""
    if is_full(error):
        return f"{error}; free some space and run the same command again, which goes on where it stopped"
    return str(error)


def run(main: Callable[[list[str]], int]) -> NoReturn:
    """Exit as `main` says; after Ctrl-C without a traceback."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("cut off; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _terminate(signum: int, frame: FrameType | None) -> None:
    # Ray and `rayspec recipe` may both send one, and the second must not cut off what the first has begun; a handler
    # and not SIG_IGN, which processes started from here would inherit
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise SystemExit(128 + signum)
