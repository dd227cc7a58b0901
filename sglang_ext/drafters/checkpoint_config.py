"""config.json of a drafter checkpoint, read and checked.

Two forms are read: our own (`architectures: [RaySpec<Kind>]`, any drafter and head kind) and stock EAGLE-3
(`LlamaForCausalLMEagle3`, which is the head kind `full` or `truncated`; see stock.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from sglang_ext.drafters import DEFAULT, families, family
from sglang_ext.drafters.base import Drafter, DrafterConfig
from sglang_ext.drafters.stock import EAGLE3
from sglang_ext.drafters.target import TargetInfo, stored_taps, taps_for_vllm
from sglang_ext.heads import DraftHead, HeadConfig, build_head, parse_head
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.json_text import check_mapping, parse_json
from sglang_ext.settings import Settings, build
from sglang_ext.trees import TreeOptions, build_tree, parse_draft_tree

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SharedTensors(Settings):
    """An entry of `rayspec.shares`: tensors that lie in another drafter's folder, the fingerprint of its weights."""

    drafter: str  # path relative to the folder that shares
    sha256: str
    tensors: tuple[str, ...]

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], path: str) -> Self:
        return build(cls, check_mapping(entry, f"{path}: rayspec.shares[]"), f"{path}: rayspec.shares[]")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """config.json, read and checked. `target` is None for a stock checkpoint, which does not name its target; `tree` is
    None where the drafter has none of its own."""

    path: str
    body: DrafterConfig
    head: HeadConfig
    target: TargetInfo | None
    tree: TreeOptions | None = None
    shares: tuple[SharedTensors, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The drafter's family."""
        return self.body.kind

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
    if architecture == EAGLE3.architecture:
        return _stock_info(config, path)
    kinds = {own.config_class.architecture: kind for kind, own in families().items()}
    if not isinstance(architecture, str) or architecture not in kinds:
        raise ValueError(
            f"{path}: architectures must be one of {[*kinds, EAGLE3.architecture]}, got {config.get('architectures')}"
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
    tree = None
    if config.get("draft_tree") is not None:
        try:
            tree = parse_draft_tree(config["draft_tree"])
            body.check_tree(tree.kind, "draft_tree")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return CheckpointInfo(
        path=path,
        body=body,
        head=_head(config["draft_head"], body, path),
        target=target,
        tree=tree,
        shares=tuple(SharedTensors.from_dict(entry, path) for entry in shares),
        provenance={k: v for k, v in ours.items() if k not in ("format_version", "target", "shares")},
    )


def _stock_info(config: Mapping[str, Any], path: str) -> CheckpointInfo:
    try:
        taps, for_vllm = stored_taps(config), taps_for_vllm(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if for_vllm and for_vllm != taps:
        _say_other_taps(path, tuple(for_vllm), tuple(taps))
    elif not taps:
        _say_default_taps(path)
    hidden = config.get("target_hidden_size", config.get("hidden_size"))
    body = _body(DEFAULT, config, hidden, tuple(taps) or None, path)
    draft_vocab = config.get("draft_vocab_size") or body.vocab_size
    if type(draft_vocab) is not int or not 1 <= draft_vocab <= body.vocab_size:
        raise ValueError(f"{path}: draft_vocab_size must be in 1..{body.vocab_size} (vocab_size), got {draft_vocab}")
    entry = {"kind": "full"} if draft_vocab == body.vocab_size else {"kind": "truncated", "size": draft_vocab}
    return CheckpointInfo(path=path, body=body, head=_head(entry, body, path), target=None)


def _head(entry: Mapping[str, Any], body: DrafterConfig, path: str) -> HeadConfig:
    with naming(path):
        head = parse_head(entry)
        head.check_sizes(body.hidden_size, body.vocab_size)
        return head


@cache  # once a process
def _say_default_taps(path: str) -> None:
    logger.warning(
        "%s: config.json has no eagle_config.eagle_aux_hidden_state_layer_ids; the tapped layers are SGLang's default, "
        "2, n // 2 and n - 3 of a target of n layers",
        path,
    )


@cache  # once a process
def _say_other_taps(path: str, for_vllm: tuple[int, ...], taps: tuple[int, ...]) -> None:
    logger.warning(
        "%s: config.json names the layers %s for vLLM (whose input is tapped), but %s for SGLang, which serves it "
        "here; if those of vLLM were meant, rayspec convert makes a drafter that taps them",
        *(path, list(for_vllm), list(taps) or "its default"),
    )


def _body(kind: str, config: Mapping[str, Any], target_hidden: Any, taps: tuple[int, ...] | None, path: str) -> Any:
    try:
        return family(kind).config_class.from_json(config, target_hidden, taps)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def config_json(drafter: Drafter, target: TargetInfo, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a drafter; `provenance` holds trained_on, recipe and commit."""
    config = {
        "architectures": [drafter.config.architecture],
        **drafter.config.to_json(),
        "draft_head": drafter.lm_head.spec(),
    }
    if drafter.draft_tree is not None:
        config["draft_tree"] = drafter.draft_tree.spec()
    return config | {"rayspec": {"format_version": FORMAT_VERSION, "target": target.to_dict(), **provenance}}


def empty_drafter(info: CheckpointInfo) -> Drafter:
    """The drafter of a checkpoint without its weights (head weights are NaN)."""
    tree = None if info.tree is None else build_tree(info.tree, vocab_size=info.body.vocab_size)
    return family(info.kind).drafter_class(info.body, empty_head(info), tree)


def empty_head(info: CheckpointInfo) -> DraftHead | PositionHeads:
    """The head of a checkpoint without its weights."""

    def make() -> DraftHead:
        return build_head(info.head, hidden_size=info.body.hidden_size, vocab_size=info.body.vocab_size)

    return info.body.heads(make)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """ValueErrors say which drafter they are of, which a head does not know."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"drafter {path}: {error}") from error
