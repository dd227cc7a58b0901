"""The drafter checkpoint, a folder of config.json and model.safetensors: its tensors, strict in both directions.

What config.json says is `checkpoint_config.py`'s. A drafter of our own may share tensors with others, named in
`rayspec.shares`: a family of heads on one body stores the body once. Writing replaces nothing but a drafter of our own,
and that only once the new one is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint_config import (
    CheckpointInfo,
    SharedTensors,
    config_json,
    empty_drafter,
    naming,
    read_info,
)
from sglang_ext.drafters.numbers import check_finite, kind_of_numbers, not_finite
from sglang_ext.drafters.stock import from_stock, stock_names
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folder_kinds import DRAFTER, WEIGHTS
from sglang_ext.folders import save_tensors, written_whole
from sglang_ext.heads import DraftHead
from sglang_ext.trees import build_tree

HEAD_PREFIX = "lm_head."
TREE_PREFIX = "draft_tree."


def check_tensors(found: Mapping[str, Tensor], info: CheckpointInfo) -> None:
    """Raise ValueError unless names, shapes and kinds of numbers are exactly those that the drafter and its head need.
    Values are not looked at, so that tensors may be on `meta`."""
    with torch.device("meta"):
        expected = empty_drafter(info).state_dict()
    problems = [f"missing {name} {list(t.shape)}" for name, t in expected.items() if name not in found]
    problems += [f"unknown {name} {list(t.shape)}" for name, t in found.items() if name not in expected]
    both = [(name, found[name], t) for name, t in expected.items() if name in found]
    problems += [
        f"{name} has shape {list(t.shape)}, expected {list(wanted.shape)}"
        for name, t, wanted in both
        if t.shape != wanted.shape
    ]
    problems += [
        f"{name} holds {t.dtype}, expected {kind_of_numbers(wanted.dtype)}"
        for name, t, wanted in both
        if kind_of_numbers(t.dtype) != kind_of_numbers(wanted.dtype)
    ]
    if problems:
        raise ValueError(
            f"drafter {info.path} does not fit its config.json (head {info.head}): {'; '.join(problems)}. "
            "Correct config.json, or export the drafter again with rayspec train"
        )


def read_tensors(info: CheckpointInfo, held: Collection[str] = ()) -> dict[str, Tensor]:
    """All tensors of a drafter under our names, the shared ones included, checked against its config.json.

    `held`: those that the caller has already (`origins`); they are not read, and come on `meta`.

    Raises ValueError for anything missing, unknown or misshapen, for numbers of another kind or that are not finite,
    and for a shared drafter that has changed.
    """
    with _open(_weights_file(info)) as handle:
        names = {info.body.own_name(name): name for name in handle.keys()}  # noqa: SIM118
        tensors = {own: _read(handle, name, is_held=own in held) for own, name in names.items()}
    if info.is_stock:
        tensors = from_stock(tensors, vocab_size=info.body.vocab_size, path=info.path)
    tensors |= shared_tensors(info, own=tensors, held=held)
    check_tensors(tensors, info)
    check_finite({name: t for name, t in tensors.items() if name not in held}, info.path)
    return tensors


def check_files(info: CheckpointInfo) -> None:
    """Raise ValueError unless names, shapes and kinds of numbers of the stored tensors are the right ones; weights are
    not read."""
    with _open(_weights_file(info)) as handle:
        found = {info.body.own_name(name): _unread(handle, name) for name in handle.keys()}  # noqa: SIM118
    if info.is_stock:
        found = stock_names(found, info.body.vocab_size)
    for shares in info.shares:
        with _open(_shared_file(info, shares)) as handle:
            present = set(handle.keys())
            found |= {n: _unread(handle, n) for n in shares.tensors if n in present}
    check_tensors(found, info)


def _read(handle: Any, name: str, *, is_held: bool) -> Tensor:
    return _unread(handle, name) if is_held else handle.get_tensor(name)


def _unread(handle: Any, name: str) -> Tensor:
    """A stored tensor without its values."""
    stored = handle.get_slice(name)
    shape = stored.get_shape()
    return stored[:0].new_empty(shape, device="meta") if shape else handle.get_tensor(name)


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no whole safetensors file ({error}); copy or make the drafter again") from error
    with handle:
        yield handle


def _weights_file(info: CheckpointInfo) -> Path:
    file = Path(info.path) / WEIGHTS
    if not file.is_file():
        raise ValueError(f"no drafter weights at {file} (pickled .bin files are not read)")
    return file


def _shared_file(info: CheckpointInfo, shares: SharedTensors) -> Path:
    file = Path(info.path) / shares.drafter / WEIGHTS
    if not os.path.isfile(file):
        raise ValueError(
            f"drafter {info.path} shares tensors with {shares.drafter}, but there is no {file}; keep the folders "
            "side by side as they were written"
        )
    if weights_sha256(file) != shares.sha256:
        raise ValueError(
            f"drafter {info.path} shares tensors with {shares.drafter}, whose weights have changed since; make the "
            "drafter again with rayspec train"
        )
    return file


def shared_tensors(info: CheckpointInfo, own: Iterable[str], held: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensors that a drafter shares with others; those `held` on `meta`. Raises ValueError."""
    tensors: dict[str, Tensor] = {}
    for shares in info.shares:
        file = _shared_file(info, shares)
        twice = {*own, *tensors} & set(shares.tensors)
        with _open(file) as handle:
            missing = set(shares.tensors) - set(handle.keys())
            if twice or missing:
                raise ValueError(
                    f"{info.path}: rayspec.shares names {sorted(twice | missing)}, which the drafter has itself or "
                    f"which {shares.drafter} does not have; make the drafter again"
                )
            tensors |= {n: _read(handle, n, is_held=n in held) for n in shares.tensors}
    return tensors


def origins(info: CheckpointInfo) -> dict[str, str]:
    """The fingerprint of the file in which each tensor lies, by our names: tensors of one name and origin are equal.
    Empty for a stock checkpoint, whose tensors are made of what lies there. Raises ValueError for a file that is gone
    or has changed."""
    if info.is_stock:
        return {}
    file = _weights_file(info)
    with _open(file) as handle:
        found = dict.fromkeys(map(info.body.own_name, handle.keys()), weights_sha256(file))
    for shares in info.shares:
        _shared_file(info, shares)
        found |= dict.fromkeys(shares.tensors, shares.sha256)
    return found


def load_drafter(
    path: str | Path, dtype: torch.dtype = torch.float32, stop_ids: Iterable[int] = ()
) -> tuple[Drafter, CheckpointInfo]:
    """Load a drafter folder strictly, on the CPU. Raises ValueError for anything missing, unknown or misshapen, for
    tensors of the head that contradict each other, and where it cannot propose one of the target's `stop_ids`."""
    info = read_info(path)
    tensors = read_tensors(info)
    drafter = empty_drafter(info)
    with naming(info.path):
        drafter.load_state_dict(tensors)
        check_loaded(drafter, stop_ids)
    return drafter.to(dtype), info


def drafter_shapes(path: str | Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """The drafter of a folder on the `meta` device, but for its tree and the maps of its heads: all that counting
    needs. Weights are not read. Raises ValueError as `check_files`."""
    info = read_info(path)
    check_files(info)
    with torch.device("meta"):
        drafter = empty_drafter(info).to(dtype)
    with naming(info.path):
        for name, head in drafter.named_modules():
            if isinstance(head, DraftHead) and head.maps:
                found = _read_named(info, [f"{name}.{own}" for own in head.maps])
                head.take_maps({own: found[f"{name}.{own}"] for own in head.maps})
    if info.tree is not None:
        with naming(info.path):
            tree = build_tree(info.tree, vocab_size=info.body.vocab_size)
            found = _read_named(info, [TREE_PREFIX + name for name in tree.state_dict()])
            tree.load_state_dict({name.removeprefix(TREE_PREFIX): tensor for name, tensor in found.items()})
            tree.check()
        drafter.draft_tree = tree
    return drafter


def _read_named(info: CheckpointInfo, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a checked drafter's tensors, wherever they lie."""
    shared_in = {name: _shared_file(info, shares) for shares in info.shares for name in shares.tensors}
    found = {}
    for name in names:
        with _open(shared_in.get(name) or _weights_file(info)) as handle:
            found[name] = handle.get_tensor(name)
    return found


def load_sharing(drafter: nn.Module, tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    """Load an empty drafter, whose names have been looked at (`check_tensors`). Parameters and buffers that are `held`
    by another one it shares from then on, in the form and on the device that they have there."""
    for name, tensor in held.items():  # first: a head may lay out what it loads beside them
        place, _, own = name.rpartition(".")
        setattr(drafter.get_submodule(place), own, tensor)
    drafter.load_state_dict({name: t for name, t in tensors.items() if name not in held}, strict=False)


def check_loaded(drafter: Drafter, stop_ids: Iterable[int] = ()) -> None:
    """Raise ValueError where loaded tensors contradict each other, or a stop token is out of reach."""
    drafter.lm_head.check(stop_ids)
    if drafter.draft_tree is not None:
        drafter.draft_tree.check()


def save_drafter(
    path: str | Path,
    drafter: Drafter,
    target: TargetInfo,
    provenance: Mapping[str, Any] | None = None,
    extras: Mapping[str, bytes | str] | None = None,
    share_with: str | Path | None = None,
    stock: bool = False,
) -> None:
    """Write a drafter folder in bfloat16; a drafter of ours that is there is replaced once the new one is complete.

    Args:
        extras: further files by name, such as a training report.
        share_with: another drafter's folder; tensors that are equal there, or in those that it shares with, are named
            instead of stored.
        stock: write the form that SGLang serves without rayspec; only for heads that it can express.

    Raises ValueError for weights that are not finite, for an extra that would overwrite the checkpoint's own files, for
    a head that the stock form cannot express, and where anything but a drafter of ours is at `path`.
    """
    assert share_with is None or not stock, "a stock checkpoint stands alone"
    clash = {WEIGHTS, "config.json"} & set(extras or {})
    if clash:
        raise ValueError(f"not saving drafter {path}: an extra file cannot be named {clash.pop()}")
    path = Path(path)
    with written_whole(path, DRAFTER) as folder:
        tensors: Mapping[str, Tensor] = drafter.state_dict()
        config = config_json(drafter, target, provenance or {})
        if stock:
            form, where = drafter.config.stock, f"not saving {path}"
            assert form is not None, "asked for only where there is one"
            if drafter.draft_tree is not None:
                raise ValueError(
                    f"{where}: a stock checkpoint has no draft_tree; export the drafter that it was "
                    "made from, or serve it with rayspec"
                )
            body = {name: t for name, t in tensors.items() if not name.startswith(HEAD_PREFIX)}
            tensors, config = form.of(drafter.lm_head, body, config, provenance or {}, where)
        tensors = {
            name: (t.to(torch.bfloat16) if t.is_floating_point() and t.itemsize > 1 else t).contiguous().cpu()
            for name, t in tensors.items()
        }
        bad = not_finite(tensors)
        if bad:
            raise ValueError(f"not saving drafter {path}: {bad[0]} holds NaN or Inf")
        if share_with is not None:
            shares = _shared_with(tensors, path, Path(share_with))
            config["rayspec"]["shares"] = [asdict(entry) for entry in shares]
            shared = {name for entry in shares for name in entry.tensors}
            tensors = {name: t for name, t in tensors.items() if name not in shared}
        save_tensors(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, content in (extras or {}).items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _shared_with(tensors: Mapping[str, Tensor], path: Path, other: Path) -> list[SharedTensors]:
    """Which tensors equal those of the other drafter and of those that it shares tensors with; an entry each."""
    folders = [other, *(other / entry.drafter for entry in read_info(other).shares)]
    shares: list[SharedTensors] = []
    for folder in folders:
        theirs = load_file(folder / WEIGHTS)
        equal = tuple(sorted(name for name, t in tensors.items() if name in theirs and torch.equal(t, theirs[name])))
        if equal:
            relative = os.path.relpath(folder.resolve(), path.resolve())
            shares.append(SharedTensors(drafter=relative, sha256=weights_sha256(folder / WEIGHTS), tensors=equal))
    return shares
