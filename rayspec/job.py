"""What the jobs set up before anything else; imports nothing that takes time."""

import logging
import signal
from types import FrameType

from rayspec.home import set_login_apart


def set_up() -> None:
    """Warnings in one form, SIGTERM (`ray job stop`) as an exception, so that runs and engines are ended, and no
    password in an address."""
    set_login_apart()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # torch looks for a CUDA toolkit when SGLang is imported; a machine without GPU needs no warning about it
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # an MLflow server that is gone is said once
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
