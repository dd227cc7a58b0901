"""Draft heads. A new head is one module, one line here, one YAML and one test."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from sglang_ext.heads.base import Candidates, DraftHead, HeadCost, Proposal
from sglang_ext.heads.config import HeadConfig
from sglang_ext.settings import build, kind_and_options

__all__ = [
    "HEADS",
    "Candidates",
    "DraftHead",
    "HeadConfig",
    "HeadCost",
    "Proposal",
    "build_head",
    "head_class",
    "head_from_target",
    "parse_head",
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
    """The class of one of HEADS; its module is imported only now."""
    module, name = HEADS[kind].split(":")
    return getattr(import_module(module), name)


def parse_head(entry: Mapping[str, Any]) -> HeadConfig:
    """The checked config of a `draft_head` entry {kind, options...}. Raises ValueError for an unknown kind or option,
    and for one that is missing or has the wrong type."""
    kind, options = kind_and_options(entry, HEADS, "draft_head")
    return build(head_class(kind).Config, options, "draft_head")


def build_head(config: HeadConfig, *, hidden_size: int, vocab_size: int) -> DraftHead:
    """An unloaded head (weights are NaN), in the form that is stored. Raises ValueError for options that do not fit
    these sizes."""
    head = head_class(config.kind)(config, hidden_size, vocab_size)
    head.quantize(is_loaded=False)
    return head


def head_from_target(
    config: HeadConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor] | None = None
) -> DraftHead:
    """A head initialised from an LM head [V, H] and from what calibration made for it, in floating point: `quantize`
    gives it the form that its config asks for. Raises ValueError."""
    return head_class(config.kind).from_target(config, target_head_VH, artifacts or {})
