"""A copy of a drafter that needs no other folder: the tensors that it shares with others are put in."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from sglang_ext.drafters.checkpoint import WEIGHTS, check_files, load_drafter, read_info, shared_tensors


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        shutil.copytree(source, temporary, dirs_exist_ok=True)
        if info.shares:
            tensors = load_file(temporary / WEIGHTS)
            tensors |= shared_tensors(info, own=tensors)
            save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
            config = json.loads((temporary / "config.json").read_text())
            del config["rayspec"]["shares"]
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        load_drafter(temporary)  # strict: whoever gets the copy has nothing else
        temporary.chmod(0o755)  # mkdtemp and save_file keep others out
        (temporary / WEIGHTS).chmod(0o644)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
