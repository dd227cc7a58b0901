"""Small disks for tests of full and read-only ones. Who may not mount (no root, a strict container) skips them."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int, options: str = "rw") -> Iterator[Path]:
    """A disk in memory of so many MiB, mounted at the new `folder`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,{options}", "rayspec-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the program mount")
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all that is free on the disk; delete the file that is returned to free it."""
    file = disk / "ballast"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(size))
    return file
