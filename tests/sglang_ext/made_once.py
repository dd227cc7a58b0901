"""What takes long to make and comes out the same each time: kept in pytest's cache, under a hash of all that it is made
of, and shared by the workers. `pytest --cache-clear` makes everything anew."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from fixture_models import CALIBRATIONS, DRAFTERS, PROMPTS, TARGET
from volume import IS_FULL

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels/rayspec_kernels", "sglang_ext", "rayspec", "tests/sglang_ext")
HELPERS = ("tests/fixture_models.py", "tests/small_world.py", "tests/volume.py")
PACKAGES = ("sglang", "torch", "transformers", "numpy")


def made_once(config: pytest.Config, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """The folder that `make` filled, and what it returned (JSON), in this run or an earlier one of the same sources."""
    assert config.cache is not None
    folder = Path(config.cache.mkdir("made"))
    made = folder / f"{name}-{_digest()}"
    with FileLock(folder / f"{name}.lock"):
        if not (made / "returned.json").exists():
            for old in folder.glob(f"{name}-*"):
                shutil.rmtree(old)
            made.mkdir()
            returned = make(made)
            (made / "returned.json").write_text(json.dumps(returned))
        return made, json.loads((made / "returned.json").read_text())


@cache
def _digest() -> str:
    digest = hashlib.sha256(repr([IS_FULL, *map(version, PACKAGES)]).encode())
    for file in _files():
        digest.update(f"{file.relative_to(ROOT)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files() -> Iterator[Path]:
    yield from (ROOT / helper for helper in HELPERS)
    for source in SOURCES:
        yield from sorted((ROOT / source).rglob("*.py"))
    yield PROMPTS
    for models in (TARGET, *DRAFTERS.values(), CALIBRATIONS):
        yield from sorted(file for file in models.rglob("*") if file.is_file())
