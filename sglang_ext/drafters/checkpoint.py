"""The drafter checkpoint: an HF-style folder of config.json and model.safetensors, strict in both directions.

Two forms are read: our own (`architectures: [RaySpec<Kind>]`, any drafter and head kind) and stock EAGLE-3
(`LlamaForCausalLMEagle3`, which is the head kind `full` or `truncated`; see stock.py). A drafter of our own may share
tensors with others, named in `rayspec.shares`: a family of heads on one body stores the body once. Writing replaces
nothing but a drafter of our own, and that only once the new one is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from sglang_ext.drafters import DRAFTERS, architecture_of, drafter_class
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter, stored_taps
from sglang_ext.drafters.independent import IndependentConfig, IndependentDrafter
from sglang_ext.drafters.json_text import check_mapping, parse_json
from sglang_ext.drafters.last_hidden import LastHiddenConfig, LastHiddenDrafter
from sglang_ext.drafters.numbers import check_finite, kind_of_numbers, not_finite
from sglang_ext.drafters.stock import (
    STOCK_ARCHITECTURE,
    from_stock,
    stock_config,
    stock_matrix,
    stock_names,
    to_stock,
)
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folders import Artefact, save_tensors, written_whole
from sglang_ext.heads import DraftHead, build_head
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees import build_tree

Drafter = Eagle3Drafter | LastHiddenDrafter | IndependentDrafter

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
EXPORTED = "export.json"  # beside a stock checkpoint: its own config.json has no room for where it comes from
PACKED = "packed.json"  # beside a checkpoint that ships without the rows that its target has
HEAD_PREFIX = "lm_head."
TREE_PREFIX = "draft_tree."
SETTLED_S = 2.0


def _is_drafter(folder: Path) -> bool:
    """Whether rayspec wrote it, in either form."""
    try:
        return "rayspec" in read_config(folder) or (folder / EXPORTED).is_file()
    except ValueError:
        return False


DRAFTER = Artefact(
    what="drafter",
    files=("config.json", WEIGHTS, EXPORTED, PACKED, "training.json", "training.png"),
    is_ours=_is_drafter,
)


@dataclass(frozen=True, kw_only=True)
class SharedTensors:
    """An entry of `rayspec.shares`: tensors that lie in another drafter's folder, the fingerprint of its weights."""

    drafter: str  # path relative to the folder that shares
    sha256: str
    tensors: tuple[str, ...]

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], path: str) -> Self:
        if set(check_mapping(entry, f"{path}: rayspec.shares[]")) != set(cls.__dataclass_fields__):
            raise ValueError(
                f"{path}: an entry of rayspec.shares needs {sorted(cls.__dataclass_fields__)}, got {sorted(entry)}"
            )
        tensors, texts = entry["tensors"], (entry["drafter"], entry["sha256"])
        if not isinstance(tensors, list) or not all(isinstance(text, str) for text in (*tensors, *texts)):
            raise ValueError(f"{path}: an entry of rayspec.shares must hold text, and a list of names, got {entry}")
        return cls(**{**entry, "tensors": tuple(tensors)})


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """config.json, read and checked. `target` is None for a stock checkpoint, which does not name its target; `tree` is
    None where the drafter has none of its own."""

    path: str
    body: Eagle3Config | LastHiddenConfig | IndependentConfig
    head: Mapping[str, Any]
    target: TargetInfo | None
    kind: str = "eagle3"
    tree: Mapping[str, Any] | None = None
    shares: tuple[SharedTensors, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        return self.target is None


def read_info(path: str | Path) -> CheckpointInfo:
    """Read config.json of a drafter folder. Raises ValueError (what is wrong, and the way out)."""
    return parse_info(read_config(path), str(path))


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a folder as it is. Raises ValueError where there is none."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"no drafter checkpoint at {path}: {file.name} is missing (rayspec train makes one)")
    try:
        config = parse_json(file.read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} is no valid JSON ({error}); make the drafter again, or copy it whole") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an ordinary causal language model's, which SGLang drafts with by itself."""
    return str(_architecture(config)).endswith(("ForCausalLM", "LMHeadModel"))


def _architecture(config: Mapping[str, Any]) -> Any:
    """The first of `architectures`; None where there is none."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else None


def parse_info(config: Mapping[str, Any], path: str) -> CheckpointInfo:
    """Check a config.json that was read from `path`. Raises ValueError."""
    architecture = _architecture(config)
    for name in ("draft_head", "draft_tree", "rayspec", "drafter", "eagle_config", "rope_parameters", "rope_scaling"):
        if config.get(name) is not None:
            check_mapping(config[name], f"{path}: {name}")
    if architecture == STOCK_ARCHITECTURE:
        return _stock_info(config, path)
    kinds = {architecture_of(kind): kind for kind in DRAFTERS}
    if not isinstance(architecture, str) or architecture not in kinds:
        raise ValueError(
            f"{path}: architectures must be one of {[*kinds, STOCK_ARCHITECTURE]}, got {config.get('architectures')}"
        )
    ours = config.get("rayspec") or {}
    if ours.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: rayspec.format_version is {ours.get('format_version')}, this release reads {FORMAT_VERSION}; "
            "train the drafter again or use the release that wrote it"
        )
    if config.get("draft_head") is None:
        raise ValueError(f"{path}: config.json has no draft_head")
    shares = ours.get("shares", [])
    if not isinstance(shares, list):
        raise ValueError(f"{path}: rayspec.shares must be a list, got {shares!r}")
    kind = kinds[architecture]
    try:
        target = TargetInfo.from_dict(ours.get("target") or {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    body = _body(kind, config, target.hidden_size, target.tap_layers, path)
    if body.vocab_size != target.vocab_size:
        raise ValueError(
            f"{path}: vocab_size is {body.vocab_size}, but rayspec.target.vocab_size is {target.vocab_size}; both must "
            "be the target's, also for a reduced head; correct config.json, or export the drafter again with "
            "rayspec train"
        )
    if kind == "independent" and "draft_tree" in config:
        raise ValueError(
            f"{path}: a drafter of kind {kind} builds its tree as it drafts; take draft_tree out of config.json"
        )
    return CheckpointInfo(
        path=path,
        body=body,
        head=dict(config["draft_head"]),
        target=target,
        kind=kind,
        tree=config.get("draft_tree"),
        shares=tuple(SharedTensors.from_dict(entry, path) for entry in shares),
        provenance={k: v for k, v in ours.items() if k not in ("format_version", "target", "shares")},
    )


def _stock_info(config: Mapping[str, Any], path: str) -> CheckpointInfo:
    try:
        taps = stored_taps(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not taps:
        _say_default_taps(path)
    hidden = config.get("target_hidden_size", config.get("hidden_size"))
    body = _body("eagle3", config, hidden, tuple(taps) or None, path)
    draft_vocab = config.get("draft_vocab_size") or body.vocab_size
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= body.vocab_size:
        raise ValueError(f"{path}: draft_vocab_size must be in 1..{body.vocab_size} (vocab_size), got {draft_vocab}")
    head = {"kind": "full"} if draft_vocab == body.vocab_size else {"kind": "truncated", "size": draft_vocab}
    return CheckpointInfo(path=path, body=body, head=head, target=None)


@cache  # once a process
def _say_default_taps(path: str) -> None:
    logger.warning(
        "%s: config.json has no eagle_config.eagle_aux_hidden_state_layer_ids; the tapped layers are SGLang's default, "
        "2, n // 2 and n - 3 of a target of n layers",
        path,
    )


def _body(kind: str, config: Mapping[str, Any], target_hidden: Any, taps: tuple[int, ...] | None, path: str) -> Any:
    try:
        return drafter_class(kind).Config.from_json(config, target_hidden, taps)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_json(drafter: Drafter, target: TargetInfo, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter; `provenance` holds trained_on, recipe and commit."""
    config = {
        "architectures": [architecture_of(drafter.kind)],
        **drafter.config.to_json(),
        "draft_head": drafter.lm_head.spec(),
    }
    if drafter.draft_tree is not None:
        config["draft_tree"] = drafter.draft_tree.spec()
    return config | {"rayspec": {"format_version": FORMAT_VERSION, "target": target.to_dict(), **provenance}}


def empty_drafter(info: CheckpointInfo) -> Drafter:
    """The drafter of a checkpoint without its weights (head weights are NaN). Raises ValueError for a bad head or
    tree."""
    if info.tree is None:
        return drafter_class(info.kind)(info.body, empty_head(info))
    head = empty_head(info)
    with naming(info):
        tree = build_tree(info.tree, vocab_size=info.body.vocab_size)
        return drafter_class(info.kind)(info.body, head, tree)


def empty_head(info: CheckpointInfo) -> DraftHead | PositionHeads:
    """The head of a checkpoint without its weights. Raises ValueError for options that it cannot have."""

    def make() -> DraftHead:
        return build_head(info.head, hidden_size=info.body.hidden_size, vocab_size=info.body.vocab_size)

    with naming(info):
        return info.body.heads(make)


@contextmanager
def naming(info: CheckpointInfo) -> Iterator[None]:
    """ValueErrors say which drafter they are of, which a head does not know."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"drafter {info.path}: {error}") from error


def own_name(info: CheckpointInfo, name: str) -> str:
    """Our name of a stored tensor: EAGLE-3's one layer has two in use."""
    return name.replace("layers.0.", "midlayer.") if info.kind == "eagle3" else name


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
            f"drafter {info.path} does not fit its config.json (head {dict(info.head)}): {'; '.join(problems)}. "
            "Correct config.json, or export the drafter again with rayspec train"
        )


def read_tensors(info: CheckpointInfo) -> dict[str, Tensor]:
    """All tensors of a drafter under our names, the shared ones included, checked against its config.json.

    Raises ValueError for anything missing, unknown or misshapen, for numbers of another kind or that are not finite,
    and for a shared drafter that has changed.
    """
    with _open(_weights_file(info)) as handle:
        tensors = {own_name(info, name): handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    if info.is_stock:
        tensors = from_stock(tensors, vocab_size=info.body.vocab_size, path=info.path)
    tensors |= shared_tensors(info, own=tensors)
    check_tensors(tensors, info)
    check_finite(tensors, info.path)
    return tensors


def check_files(info: CheckpointInfo) -> None:
    """Raise ValueError unless names, shapes and kinds of numbers of the stored tensors are the right ones; weights are
    not read."""
    with _open(_weights_file(info)) as handle:
        found = {own_name(info, name): _unread(handle, name) for name in handle.keys()}  # noqa: SIM118
    if info.is_stock:
        found = stock_names(found, info.body.vocab_size)
    for shares in info.shares:
        with _open(_shared_file(info, shares)) as handle:
            present = set(handle.keys())
            found |= {n: _unread(handle, n) for n in shares.tensors if n in present}
    check_tensors(found, info)


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


def shared_tensors(info: CheckpointInfo, own: Iterable[str]) -> dict[str, Tensor]:
    """The tensors that a drafter shares with others. Raises ValueError."""
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
            tensors |= {name: handle.get_tensor(name) for name in shares.tensors}
    return tensors


def held_in_common(info: CheckpointInfo, other: CheckpointInfo) -> set[str]:
    """Names of tensors that two drafters take from the same weights of a third: they are equal."""
    one, two = ({n: s.sha256 for s in i.shares for n in s.tensors} for i in (info, other))
    return {name for name, sha256 in one.items() if two.get(name) == sha256}


def weights_sha256(file: str | Path) -> str:
    """Fingerprint of a file of weights that stays what it is, read once in a process: a base may hold gigabytes, and
    many heads name it. Raises ValueError where there is none."""
    if not Path(file).is_file():
        raise ValueError(f"no drafter weights at {file} (pickled .bin files are not read)")
    stat = Path(file).stat()
    # what was written a moment ago can be written again without a change of its time
    read = _sha256 if time.time() - stat.st_mtime > SETTLED_S else _sha256.__wrapped__
    return read(Path(file).resolve(), stat.st_ino, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=64)
def _sha256(file: Path, *version: int) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def load_drafter(
    path: str | Path, dtype: torch.dtype = torch.float32, stop_ids: Iterable[int] = ()
) -> tuple[Drafter, CheckpointInfo]:
    """Load a drafter folder strictly, on the CPU. Raises ValueError for anything missing, unknown or misshapen, for
    tensors of the head that contradict each other, and where it cannot propose one of the target's `stop_ids`."""
    info = read_info(path)
    tensors = read_tensors(info)
    drafter = empty_drafter(info)
    with naming(info):
        drafter.load_state_dict(tensors)
        check_loaded(drafter, stop_ids)
    return drafter.to(dtype), info


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
        tensors: dict[str, Tensor] = drafter.state_dict()
        config = config_json(drafter, target, provenance or {})
        if stock:
            assert isinstance(drafter, Eagle3Drafter), "stock.py knows EAGLE-3 alone"
            if drafter.draft_tree is not None:
                raise ValueError(
                    f"not saving {path}: a stock EAGLE-3 checkpoint has no draft_tree; export the drafter that it was "
                    "made from, or serve it with rayspec"
                )
            weight_SH, ids_S = stock_matrix(drafter.lm_head, f"not saving {path}")
            body = {name: t for name, t in tensors.items() if not name.startswith(HEAD_PREFIX)}
            tensors = to_stock(body, weight_SH, ids_S, vocab_size=drafter.config.vocab_size)
            config = stock_config(config, len(ids_S))
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
    """Of the other drafter and of those with which it shares, each with what is equal there."""
    folders = [other, *(other / entry.drafter for entry in read_info(other).shares)]
    shares: list[SharedTensors] = []
    for folder in folders:
        theirs = load_file(folder / WEIGHTS)
        equal = tuple(sorted(name for name, t in tensors.items() if name in theirs and torch.equal(t, theirs[name])))
        if equal:
            relative = os.path.relpath(folder.resolve(), path.resolve())
            shares.append(SharedTensors(drafter=relative, sha256=weights_sha256(folder / WEIGHTS), tensors=equal))
    return shares
