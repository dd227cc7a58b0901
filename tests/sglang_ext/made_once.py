"""What takes long to make and comes out the same each time: kept in pytest's cache, under a hash of all that it is made
of, and shared by the workers. `pytest --cache-clear` makes everything anew."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from fixture_models import CALIBRATIONS, DRAFTERS, TARGET
from volume import IS_FULL

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ("sglang_ext/adapter", "kernels/rayspec_kernels")  # what an engine without a drafter is made of
TRAINING = (*ENGINE, "sglang_ext", "rayspec/training", "tests/sglang_ext", "tests/small_world.py")
PACKAGES = ("sglang", "torch", "transformers", "numpy")


def made_once(
    config: pytest.Config, name: str, sources: Iterable[str], make: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """The folder that `make` filled, and what it returned (JSON), by this run or an earlier one of the same sources."""
    assert config.cache is not None
    folder = Path(config.cache.mkdir("made"))
    made = folder / f"{name}-{_digest(tuple(sources))}"
    with FileLock(folder / f"{name}.lock"):
        if not (made / "returned.json").exists():
            for old in folder.glob(f"{name}-*"):
                shutil.rmtree(old)
            made.mkdir()
            returned = make(made)
            (made / "returned.json").write_text(json.dumps(returned))
        return made, json.loads((made / "returned.json").read_text())


@cache
def _digest(sources: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr([IS_FULL, *map(version, PACKAGES)]).encode())
    for file in _files(sources):
        digest.update(f"{file.relative_to(ROOT)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _files(sources: Iterable[str]) -> Iterator[Path]:
    for source in sources:
        path = ROOT / source
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))
    for models in (TARGET, *DRAFTERS.values(), CALIBRATIONS):
        yield from sorted(file for file in models.rglob("*") if file.is_file())
