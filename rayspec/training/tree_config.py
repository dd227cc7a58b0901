"""How the tree of a drafter is made: an entry `tree: {kind: ..., options}` of jobs/train.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rayspec.calibration.options import parse


@dataclass(frozen=True, kw_only=True)
class StaticTreeConfig:
    """A tree of one shape: from a JSON `file` of rank paths, or the `nodes` (with the root) that are expected to be
    accepted longest, by the accuracies of the `topk` best candidates of every position along `sequences` of the
    target's greedy answers."""

    kind: ClassVar[str] = "static"

    nodes: int = 64
    topk: int = 10
    sequences: int = 64
    file: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("nodes", 2), ("topk", 1), ("sequences", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


TREE_CONFIGS = {config.kind: config for config in (StaticTreeConfig,)}


def parse_tree(entry: Mapping[str, Any], path: str) -> StaticTreeConfig:
    """The checked config of a `tree` entry. Raises ValueError, which names the setting by its `path`."""
    return parse(TREE_CONFIGS, entry, path)
