"""Drafters as they ship: without the rows that they have from the target's own head, which the target brings along.

`pack` writes a packed folder from a drafter's; `unpack` makes the drafter again, bit for bit, from the packed folder
and the target. A packed folder is config.json, model.safetensors with the other tensors, and packed.json.

    python -m rayspec.packing TARGET_FOLDER OUTPUT_FOLDER DRAFTER_FOLDER...
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.drafters.checkpoint import WEIGHTS, weights_sha256

MANIFEST = "packed.json"
METADATA = {"format": "pt"}
IDS = "lm_head.ids"  # which rows of the target's head a truncated head has


def target_head(folder: Path) -> Tensor:
    """The target's LM head [V, H] as stored, which may be tied to its embedding. Raises ValueError without one."""
    found: Tensor | None = None
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names = set(handle.keys())
            if "lm_head.weight" in names:
                return handle.get_tensor("lm_head.weight")
            if "model.embed_tokens.weight" in names:
                found = handle.get_tensor("model.embed_tokens.weight")
    if found is None:
        raise ValueError(f"target {folder} stores neither lm_head.weight nor model.embed_tokens.weight")
    return found


def pack(drafter: Path, folder: Path, target: Path) -> int:
    """Write the packed form of a drafter to the new `folder`; bytes of its weights. Raises ValueError."""
    tensors, head_VH = load_file(drafter / WEIGHTS), target_head(target)
    taken = {name: _source(name, t, tensors, head_VH) for name, t in tensors.items()}
    taken = {name: source for name, source in taken.items() if source is not None}
    manifest = {"sha256": weights_sha256(drafter / WEIGHTS), "from_target": taken}
    with _new_folder(folder) as temporary:
        save_file({n: t for n, t in tensors.items() if n not in taken}, temporary / WEIGHTS, metadata=METADATA)
        for file in drafter.iterdir():
            if file.name not in (WEIGHTS, MANIFEST) and file.is_file():
                shutil.copy2(file, temporary / file.name)
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return (folder / WEIGHTS).stat().st_size


def unpack(packed: Path, folder: Path, target: Path) -> None:
    """Make the drafter of a packed folder in the new `folder`. Raises ValueError where the target is not the one that
    it was packed with."""
    manifest = read_manifest(packed)
    tensors = load_file(packed / WEIGHTS)
    if manifest["from_target"]:
        head_VH = target_head(target)
        for name, source in manifest["from_target"].items():
            tensors[name] = head_VH if source == "all" else head_VH[tensors[IDS]]
    with _new_folder(folder) as temporary:
        for file in packed.iterdir():
            if file.name != WEIGHTS:
                shutil.copy2(file, temporary / file.name)
        save_file(tensors, temporary / WEIGHTS, metadata=METADATA)
        if weights_sha256(temporary / WEIGHTS) != manifest["sha256"]:
            raise ValueError(
                f"drafter {packed.name} does not come out of {packed} as it was packed: the target {target} is another "
                "one, or a file is damaged; fetch the target anew (python jobs/fetch_target.py) or install rayspec anew"
            )


def read_manifest(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / MANIFEST).read_text())


def _source(name: str, tensor: Tensor, tensors: Mapping[str, Tensor], head_VH: Tensor) -> str | None:
    """Which rows of the target's head a tensor is: `all`, those of `IDS`, or None."""
    if tensor.dtype != head_VH.dtype or tensor.dim() != 2 or tensor.shape[1] != head_VH.shape[1]:
        return None
    if tensor.shape == head_VH.shape and torch.equal(tensor, head_VH):
        return "all"
    ids = tensors.get(IDS)
    if ids is not None and len(ids) == len(tensor) and torch.equal(tensor, head_VH[ids]):
        return IDS
    return None


class _new_folder:
    """A temporary folder that takes its name once it is whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Path:
        if self.folder.exists():
            raise ValueError(f"{self.folder} exists; name a new folder")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}-", dir=self.folder.parent))
        return self.temporary

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is None:
            self.temporary.chmod(0o755)  # mkdtemp and save_file keep others out
            (self.temporary / WEIGHTS).chmod(0o644)
            os.rename(self.temporary, self.folder)
        else:
            shutil.rmtree(self.temporary, ignore_errors=True)


def main(arguments: list[str]) -> int:
    if len(arguments) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    target, output, *drafters = map(Path, arguments)
    for drafter in drafters:
        print(f"{drafter.name}: {pack(drafter, output / drafter.name, target) / 2**20:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
