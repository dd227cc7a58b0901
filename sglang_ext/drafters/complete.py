"""A copy of a drafter that needs no other folder: the tensors that it shares with others are put in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file

from sglang_ext.artefacts import DRAFTER, WEIGHTS
from sglang_ext.drafters.checkpoint import check_files, load_drafter, shared_tensors
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.folders import save_tensors, written_whole


def write_complete(source: str | Path, folder: str | Path) -> None:
    """Copy the drafter folder `source` to the new `folder`, its tensors bit for bit, without `rayspec.shares`.

    Raises ValueError for a drafter that does not load or holds symbolic links, and for a `folder` that exists.
    """
    info, folder = read_info(source), Path(folder)
    if folder.exists():
        raise ValueError(f"not copying drafter {source}: {folder} exists; name a new folder")
    links = sorted(str(p.relative_to(source)) for p in Path(source).rglob("*") if p.is_symlink())
    if links:
        raise ValueError(
            f"not copying drafter {source}: {', '.join(links[:5])} in it are symbolic links, and what they point at "
            "may be no part of it; put a copy with the files themselves in its place (cp -rL)"
        )
    check_files(info)
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
