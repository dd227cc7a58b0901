"""Folders of ours on disk: written beside their place, moved there whole, and never onto anything that is not ours.

A drafter, a calibration, a target: each `FolderKind` says which files one holds and how it is told from a folder of
somebody else's. Only such a folder is ever replaced; whatever else is in the way is named, and stays.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sglang_ext.whole import draft_folder, put_in_place

NAME_BYTES = 200  # file systems allow 255, of which a draft's name needs some


@dataclass(frozen=True, kw_only=True)
class FolderKind:
    """A kind of folder. `files`: patterns of all names that one may hold; `is_ours`: whether a folder is one."""

    what: str
    files: tuple[str, ...]
    is_ours: Callable[[Path], bool]


def check_name(name: str, setting: str) -> None:
    """Raise ValueError unless `name` names one new folder inside another."""
    is_plain = name not in ("", ".", "..") and Path(name).name == name and "\0" not in name
    if not is_plain or len(os.fsencode(name)) > NAME_BYTES:
        raise ValueError(
            f"{setting} must be a plain folder name (not . or .., without a slash, of at most {NAME_BYTES} bytes), got "
            f"{name!r}"
        )


def check_unique(names: Sequence[str], setting: str) -> None:
    """Raise ValueError for a name that comes twice."""
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"{setting} must be unique, got {twice[0]!r} more than once")


def check_place(folder: Path, kind: FolderKind) -> None:
    """Raise ValueError unless one of a kind may be written as `folder`: the place is free, an empty folder, or holds
    one of ours and nothing else."""
    there = f"cannot write the {kind.what} {folder}"
    if folder.name in ("", ".."):
        raise ValueError(f"{there}: it is no folder's own name; name a new folder")
    if folder.is_symlink():
        raise ValueError(f"{there}: a link is there, to {folder.readlink()}; name the folder itself, or another one")
    if folder.exists():
        foreign = _foreign(folder, kind)
        if foreign:
            raise ValueError(f"{there}: {foreign}; nothing of it is deleted: move it away, or choose another place")
    check_parents(folder, there)


def check_parents(folder: Path, there: str) -> None:
    """Raise ValueError, which begins with `there`, where nothing can be written inside the parents of `folder`."""
    try:
        above = next(parent for parent in folder.absolute().parents if parent.exists() or parent.is_symlink())
    except OSError as error:  # a name that is too long, say
        raise ValueError(f"{there}: no folder can be there ({error.strerror}); choose another place") from error
    if not above.is_dir():
        raise ValueError(f"{there}: {above} is no folder; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{there}: {above} cannot be written to; choose another place, or make it writable")


def _foreign(folder: Path, kind: FolderKind) -> str | None:
    """What is in the way at a path that exists."""
    if not folder.is_dir():
        return "a file is there"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return None
    if not kind.is_ours(folder):
        return f"the folder that is there holds {_some(names)} and is no {kind.what} of rayspec's"
    others = [n for n in names if not _is_own_file(folder / n, kind)]
    return f"beside the {kind.what} that is there lies {_some(others)}" if others else None


def _is_own_file(file: Path, kind: FolderKind) -> bool:
    return file.is_file() and any(fnmatch.fnmatchcase(file.name, pattern) for pattern in kind.files)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


@contextmanager
def written_whole(folder: Path, kind: FolderKind) -> Iterator[Path]:
    """A new folder to write in, which becomes `folder` at the end of the block, or nothing does.

    What is there is replaced by renaming, and stays until then. Raises ValueError as check_place, and OSError where the
    disk refuses.
    """
    check_place(folder, kind)
    with draft_folder(folder) as draft:
        yield draft
        for file in filter(Path.is_file, draft.iterdir()):
            file.chmod(0o644)  # save_file keeps others out
        draft.chmod(0o755)
        check_place(folder, kind)  # again: what was written may have taken hours
        old = put_in_place(draft, folder)
        if old is not None:
            for file in old.iterdir():
                if _is_own_file(file, kind):
                    file.unlink()
            old.rmdir()


def save_tensors(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file. Raises OSError where the disk refuses, as other writes do."""
    try:
        save_file(dict(tensors), file, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{file} could not be written: {error}") from error
