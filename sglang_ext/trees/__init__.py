"""Which of a drafter's candidates are verified. A new kind is one module, one line here and one test."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sglang_ext.trees.base import CandidateTree, Draft, Expansion, Proposer, Pruner, PruningTree

__all__ = ["TREES", "CandidateTree", "Draft", "Expansion", "Proposer", "Pruner", "PruningTree", "build_tree"]

TREES: dict[str, str] = {
    "static": "sglang_ext.trees.static:StaticTree",
    "slim": "sglang_ext.trees.slim:SlimTree",
}


def build_tree(spec: Mapping[str, Any], *, vocab_size: int) -> CandidateTree:
    """The tree of a `draft_tree` entry {kind, options...}, its tensors not loaded yet. Raises ValueError."""
    options = dict(spec)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in TREES:
        raise ValueError(f"unknown draft_tree.kind {kind!r}; known: {', '.join(TREES)}")
    module, name = TREES[kind].split(":")
    cls = getattr(import_module(module), name)
    return cls.from_options(options, vocab_size=vocab_size)
