"""Draft heads. A new head is one module, one line here, one YAML and one test."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from sglang_ext.heads.base import Candidates, DraftHead, HeadConfig, HeadCost, Proposal

__all__ = [
    "HEADS",
    "Candidates",
    "DraftHead",
    "HeadConfig",
    "HeadCost",
    "Proposal",
    "build_head",
    "complete_head",
    "head_class",
    "head_from_target",
]

HEADS: dict[str, str] = {
    "full": "sglang_ext.heads.full:FullHead",
    "slimspec": "sglang_ext.heads.slimspec:SlimSpecHead",
    "truncated": "sglang_ext.heads.truncated:TruncatedHead",
    "specvocab": "sglang_ext.heads.specvocab:SpecVocabHead",
    "dynaspec": "sglang_ext.heads.dynaspec:DynaSpecHead",
    "coral": "sglang_ext.heads.coral:CoralHead",
    "rdk": "sglang_ext.heads.rdk:RdkHead",
}


def head_class(kind: str) -> type[DraftHead]:
    """The class of a head kind; its module is imported only now. Raises ValueError for an unknown kind."""
    if not isinstance(kind, str) or kind not in HEADS:
        raise ValueError(f"unknown draft_head.kind {kind!r}; known: {', '.join(HEADS)}")
    module, name = HEADS[kind].split(":")
    return getattr(import_module(module), name)


def head_config(spec: Mapping[str, Any], *, hidden_size: int, vocab_size: int) -> tuple[type[DraftHead], HeadConfig]:
    """The class and checked config of a `draft_head` entry {kind, options...}. Raises ValueError."""
    cls, options = _class_and_options(spec)
    return cls, cls.Config.from_dict(options, hidden_size=hidden_size, vocab_size=vocab_size)


def complete_head(spec: Mapping[str, Any], artifacts: Mapping[str, Tensor]) -> dict[str, Any]:
    """A `draft_head` entry with what it leaves to its artifacts written out, such as how many tokens a calibration
    chose to keep. Raises ValueError."""
    cls, options = _class_and_options(spec)
    return {"kind": cls.kind, **cls.complete(options, artifacts)}


def _class_and_options(spec: Mapping[str, Any]) -> tuple[type[DraftHead], dict[str, Any]]:
    options = dict(spec)
    if "kind" not in options:
        raise ValueError(f"draft_head needs a 'kind' (one of {', '.join(HEADS)}), got {dict(spec)}")
    return head_class(options.pop("kind")), options


def build_head(spec: Mapping[str, Any], *, hidden_size: int, vocab_size: int) -> DraftHead:
    """An unloaded head (weights are NaN) of a `draft_head` entry, in the form that is stored. Raises ValueError."""
    cls, config = head_config(spec, hidden_size=hidden_size, vocab_size=vocab_size)
    head = cls(config)
    head.quantize(is_loaded=False)
    return head


def head_from_target(
    spec: Mapping[str, Any], target_head_VH: Tensor, artifacts: Mapping[str, Tensor] | None = None
) -> DraftHead:
    """A head initialised from an LM head [V, H] and from what calibration made for it, in floating point: `quantize`
    gives it the form that its config asks for. Raises ValueError."""
    vocab_size, hidden_size = target_head_VH.shape
    cls, config = head_config(spec, hidden_size=hidden_size, vocab_size=vocab_size)
    return cls.from_target(config, target_head_VH, artifacts or {})
