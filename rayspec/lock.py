"""A file that one process at a time holds. The kernel keeps the lock (flock) and takes it away with the process,
however that ends, so that nobody has to clean up behind one that was killed."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(file: Path, refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Hold `file`, which is made where it is missing, during the block. Raises `refusal` of the number of the process
    that holds it ('unknown' where it has not said yet)."""
    with open(file, "a+") as lock:
        lock.seek(0)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refusal(lock.read() or "unknown") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
