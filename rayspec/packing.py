"""Drafters as they ship: without the rows that they have from the target's own head, which the target brings along.

`pack` writes a packed folder from a drafter's; `unpack` makes the drafter again, bit for bit, from the packed folder
and the target. A packed folder is config.json, model.safetensors with the other tensors, and packed.json.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folder_kinds import DRAFTER, PACKED, WEIGHTS
from sglang_ext.folders import save_tensors, written_whole

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
    """Write the packed form of a drafter to `folder`; bytes of its weights. Raises ValueError."""
    if not DRAFTER.is_ours(drafter):
        raise ValueError(f"{drafter} is no drafter that rayspec train has made; give the folder of one")
    tensors, head_VH = load_file(drafter / WEIGHTS), target_head(target)
    taken = {name: _source(name, t, tensors, head_VH) for name, t in tensors.items()}
    taken = {name: source for name, source in taken.items() if source is not None}
    manifest = {"sha256": weights_sha256(drafter / WEIGHTS), "from_target": taken}
    with written_whole(folder, DRAFTER) as temporary:
        save_tensors({n: t for n, t in tensors.items() if n not in taken}, temporary / WEIGHTS, METADATA)
        for file in drafter.iterdir():
            if file.name not in (WEIGHTS, PACKED) and file.is_file():
                shutil.copy2(file, temporary / file.name)
        (temporary / PACKED).write_text(json.dumps(manifest, indent=2) + "\n")
    return (folder / WEIGHTS).stat().st_size


def unpack(packed: Path, folder: Path, target: Path) -> None:
    """Make the drafter of a packed folder in `folder`. Raises ValueError where the target is not the one that
    it was packed with."""
    manifest = read_manifest(packed)
    tensors = load_file(packed / WEIGHTS)
    if manifest["from_target"]:
        head_VH = target_head(target)
        for name, source in manifest["from_target"].items():
            tensors[name] = head_VH if source == "all" else head_VH[tensors[IDS]]
    with written_whole(folder, DRAFTER) as temporary:
        for file in packed.iterdir():
            if file.name != WEIGHTS:
                shutil.copy2(file, temporary / file.name)
        save_tensors(tensors, temporary / WEIGHTS, METADATA)
        if weights_sha256(temporary / WEIGHTS) != manifest["sha256"]:
            raise ValueError(
                f"drafter {packed.name} does not come out of {packed} as it was packed: the target {target} is another "
                "one, or a file is damaged; fetch the target anew (rayspec fetch) or install rayspec anew"
            )


def read_manifest(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / PACKED).read_text())


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
