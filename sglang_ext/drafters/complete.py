"""A copy of a drafter that needs no other folder: the tensors that it shares with others are put in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file

from sglang_ext.drafters.checkpoint import check_files, load_drafter, shared_tensors
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, read_info
from sglang_ext.folder_kinds import DRAFTER, WEIGHTS
from sglang_ext.folders import save_tensors, written_whole


def check_complete(source: str | Path) -> CheckpointInfo:
    """Raise ValueError for a drafter that cannot be copied: its tensors do not fit its config.json, one that it shares
    tensors with is gone or has changed, or its folder holds anything but plain files. Weights are not read."""
    info = read_info(source)
    found = sorted(p for p in Path(source).rglob("*") if p.is_symlink() or not (p.is_file() or p.is_dir()))
    if found:
        names = ", ".join(str(p.relative_to(source)) for p in found[:5])
        raise ValueError(
            f"not copying drafter {source}: {names} in it are symbolic links, or else no plain files, and what they "
            "stand for may be no part of it; put a copy with the files themselves in its place (cp -rL)"
        )
    check_files(info)
    return info


def write_complete(source: str | Path, folder: str | Path) -> None:
    """Copy the drafter folder `source` to the new `folder`, its tensors bit for bit, without `rayspec.shares`.

    Raises ValueError as check_complete, for a drafter that does not load, and for a `folder` that exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"not copying drafter {source}: {folder} exists; name a new folder")
    info = check_complete(source)
    with written_whole(folder, DRAFTER) as copy:
        shutil.copytree(source, copy, dirs_exist_ok=True)
        if info.shares:
            tensors = load_file(copy / WEIGHTS)
            tensors |= shared_tensors(info, own=tensors)
            save_tensors(tensors, copy / WEIGHTS, metadata={"format": "pt"})
            config = json.loads((copy / "config.json").read_text())
            del config["rayspec"]["shares"]
            (copy / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        load_drafter(copy)  # strict: whoever gets the copy has nothing else
