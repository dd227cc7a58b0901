"""Files and folders that are written whole or not at all: beside their place, then moved there by renaming.

A process that is killed while writing leaves what was there before, and at most a draft, whose name begins with a dot.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """The name of a file to write, which takes the place of `path` at the end of the block, or nothing does."""
    # a name of its own: two processes may write at once
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with whole_file(path) as draft:
        draft.write_text(text)


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """A new folder to write in, beside `path`. Whoever asks renames it; if it is still there then, it goes."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write in, which takes the place of the folder `path` at the end of the block, or nothing does.
    Whatever was in that is deleted: for places that are ours alone (`folders.py` has one for all others)."""
    with draft_folder(path) as draft:
        yield draft
        old = put_in_place(draft, path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)


def put_in_place(draft: Path, path: Path) -> Path | None:
    """Rename the folder `draft` to `path`. Where that was there already, its new name beside it is returned, for the
    caller to delete what may be deleted of it."""
    if not path.exists():
        draft.rename(path)
        return None
    old = draft.with_name(f"{draft.name}.old")
    path.rename(old)
    try:
        draft.rename(path)
    except OSError:
        old.rename(path)
        raise
    return old
