"""Which of a drafter's candidates are verified. CONTRIBUTING says what a new kind needs."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sglang_ext.settings import build, kind_and_options
from sglang_ext.trees.base import CandidateTree, Draft, Expansion, Proposer, Pruner, PruningTree, TreeOptions

__all__ = [
    "TREES",
    "CandidateTree",
    "Draft",
    "Expansion",
    "Proposer",
    "Pruner",
    "PruningTree",
    "TreeOptions",
    "build_tree",
    "parse_draft_tree",
]

TREES: dict[str, str] = {
    "static": "sglang_ext.trees.static:StaticTree",
    "slim": "sglang_ext.trees.slim:SlimTree",
}


def _tree_class(kind: str) -> type[CandidateTree]:
    module, name = TREES[kind].split(":")
    return getattr(import_module(module), name)


def parse_draft_tree(entry: Mapping[str, Any]) -> TreeOptions:
    """The checked options of a `draft_tree` entry {kind, options...}. Raises ValueError."""
    kind, options = kind_and_options(entry, TREES, "draft_tree")
    return build(_tree_class(kind).Options, options, "draft_tree")


def build_tree(options: TreeOptions, *, vocab_size: int) -> CandidateTree:
    """The tree of these options, its tensors not loaded yet."""
    return _tree_class(options.kind).from_options(options, vocab_size)
