"""How the tree of a drafter is made: an entry `tree: {kind: ..., options}` of rayspec train."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from torch import Tensor

from rayspec.artifacts import BIGRAM, load_artifacts
from rayspec.entries import parse
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.settings import Settings
from sglang_ext.trees.slim import SlimOptions, SlimScore


@dataclass(frozen=True, kw_only=True)
class StaticTreeConfig(Settings):
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


@dataclass(frozen=True, kw_only=True)
class SlimTreeConfig(SlimScore):
    """SLiM's tree. `bigram`: the calibration with the counted pairs, a shipped name or a folder; None only without
    correlation."""

    kind: ClassVar[str] = "slim"

    bigram: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correlation != (self.bigram is not None):
            raise ValueError(
                f"correlation is {self.correlation} and bigram {self.bigram}; name the calibration of the pairs, or "
                "set correlation: false and leave bigram out"
            )

    def options(self, pairs: int) -> SlimOptions:
        """What the tree of so many counted pairs stores."""
        return SlimOptions(**{f.name: getattr(self, f.name) for f in fields(SlimScore)}, pairs=pairs)


def read_bigram(calibration: str, target: TargetInfo | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, ids, counts) of a calibration: a shipped name or a folder. Raises ValueError where there is none, where
    it holds no pairs, or for one of another target."""
    tensors, description = load_artifacts(calibration, target)
    if not set(BIGRAM) <= set(tensors):
        raise ValueError(
            f"bigram={calibration} holds {', '.join(sorted(tensors))}, but no pairs (rule {description.get('rule')}); "
            "make them with rayspec calibrate and the rule bigram"
        )
    indptr, ids_P, counts_P = (tensors[name] for name in BIGRAM)
    return indptr, ids_P, counts_P


TreeConfig = StaticTreeConfig | SlimTreeConfig
TREE_CONFIGS: dict[str, type[TreeConfig]] = {"static": StaticTreeConfig, "slim": SlimTreeConfig}


def parse_tree(entry: Any) -> TreeConfig | None:
    """The checked config of a `tree` entry; none of none. Raises ValueError."""
    return None if entry is None else parse(TREE_CONFIGS, entry, "tree")
