"""Identifies files by the SHA-256 of their content, which is read once in a process."""

import hashlib
import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SETTLED_S = 2.0


def file_sha256(file: str | Path) -> str:
    """SHA-256 of a file, cached while the file stays as it is: a base may hold gigabytes, and many heads name it."""
    stat = Path(file).stat()
    # what was written a moment ago can be written again without a change of its time
    read = _sha256 if time.time() - stat.st_mtime > SETTLED_S else _sha256.__wrapped__
    return read(Path(file).resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@cache
def _sha256(file: Path, *version: int) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def combined_sha256(files: Mapping[str, str]) -> str:
    """One fingerprint of many, by their names."""
    return hashlib.sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()


def weights_sha256(file: str | Path) -> str:
    """SHA-256 of a drafter's weights. Raises ValueError where there are none."""
    if not Path(file).is_file():
        raise ValueError(f"no drafter weights at {file} (pickled .bin files are not read)")
    return file_sha256(file)
