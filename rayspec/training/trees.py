"""How the tree of a drafter is made: an entry `tree: {kind: ..., options}` of rayspec train, given with it or found by
how good a trained drafter's candidates are.

K = draft positions, N = answer positions, k = candidates of a draft position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayspec.artifacts import BIGRAM, load_artifacts
from rayspec.entries import parse
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.drafters.training import Batch
from sglang_ext.settings import Settings, require
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimOptions, SlimScore, SlimTree
from sglang_ext.trees.static import NODES, TOPK, StaticTree, greedy_paths, read_paths


class TreeConfig(Settings, ABC):
    """What all kinds have in common. `calibration`: that of the counted pairs, of a tree that has some."""

    kind: ClassVar[str]

    @property
    def calibration(self) -> str | None:
        return None

    @abstractmethod
    def given(self, target: TargetInfo) -> CandidateTree | None:
        """The tree that is asked for, a calibration of it looked for by the target's name; None where it is to be
        found. Raises ValueError for a file or calibration that is not there or does not fit."""

    def find(self, drafter: Drafter, target: FrozenTarget, answers: AnswerSet, recipe: Recipe) -> CandidateTree:
        """The tree of a trained drafter where none is given. Raises ValueError where there are not as many nodes."""
        raise NotImplementedError(f"a tree of kind {self.kind} is given")

    def check(self, target: TargetInfo, positions: int) -> None:
        """Raise ValueError, before anything is trained, for a tree that cannot be made for a drafter of so many
        positions."""
        self.given(target)


@dataclass(frozen=True, kw_only=True)
class StaticTreeConfig(TreeConfig):
    """A tree of one shape: from a JSON `file` of rank paths, or the `nodes` (with the root) that are expected to be
    accepted longest, by the accuracies of the `topk` best candidates of every position along `sequences` of the
    target's greedy answers."""

    kind: ClassVar[str] = "static"

    nodes: int = NODES
    topk: int = TOPK
    sequences: int = 64
    file: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("nodes", 2), ("topk", 1), ("sequences", 1)):
            require(getattr(self, name) >= least, name, getattr(self, name), f"at least {least}")

    def given(self, target: TargetInfo) -> StaticTree | None:
        return None if self.file is None else StaticTree(read_paths(self.file))

    def find(self, drafter: Drafter, target: FrozenTarget, answers: AnswerSet, recipe: Recipe) -> StaticTree:
        accuracy = rank_accuracy(drafter, target, answers, topk=self.topk, sequences=self.sequences, recipe=recipe)
        return StaticTree(greedy_paths(accuracy, self.nodes - 1))

    def check(self, target: TargetInfo, positions: int) -> None:
        if self.given(target) is not None:
            return
        most = 1 + sum(self.topk**depth for depth in range(1, positions + 1))
        if self.nodes > most:
            raise ValueError(
                f"tree.nodes must be at most {most}, which {positions} positions with topk {self.topk} have, got "
                f"{self.nodes}"
            )
        if self.topk > target.vocab_size:
            raise ValueError(f"tree.topk must be at most the vocabulary, got {self.topk}")


@dataclass(frozen=True, kw_only=True)
class SlimTreeConfig(SlimScore, TreeConfig):
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

    @property
    def calibration(self) -> str | None:
        return self.bigram

    def options(self, pairs: int) -> SlimOptions:
        """What the tree of so many counted pairs stores."""
        return SlimOptions(**{f.name: getattr(self, f.name) for f in fields(SlimScore)}, pairs=pairs)

    def given(self, target: TargetInfo) -> SlimTree:
        if self.bigram is None:
            return SlimTree(self.options(pairs=0), target.vocab_size)
        indptr, ids_P, counts_P = read_bigram(self.bigram, target)
        return SlimTree.with_counts(self.options(pairs=len(ids_P)), indptr, ids_P, counts_P)


TREE_CONFIGS: dict[str, type[TreeConfig]] = {"static": StaticTreeConfig, "slim": SlimTreeConfig}


def parse_tree(entry: Any) -> TreeConfig | None:
    """The checked config of a `tree` entry; none of none. Raises ValueError."""
    return None if entry is None else parse(TREE_CONFIGS, entry, "tree")


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


@torch.no_grad()
def rank_accuracy(
    drafter: Drafter,
    target: FrozenTarget,
    answers: AnswerSet,
    *,
    topk: int,
    sequences: int,
    recipe: Recipe,
) -> list[list[float]]:
    """[position][rank]: how often the candidate of this rank is the answer's token, along greedy answers, each
    position given the tokens that are really before it."""
    greedy = (answers.temperature_N == 0).nonzero().squeeze(1)[:sequences]
    if not len(greedy):
        raise ValueError(f"the answers {answers.name} hold no greedy sequence to choose a tree by; set greedy_share")
    positions = drafter.config.max_draft_steps
    assert positions is not None, "a drafter that expands its tree has none to be found"
    right_Kk, rows = torch.zeros(positions, topk, dtype=torch.float64, device=target.device), 0
    for indices in greedy.split(recipe.batch_size):
        batch = Batch.of(answers, indices, target.device)
        rows += len(batch.position_N)
        next_ids_N1 = batch.next_ids_N[:, None]
        for chunk_rows, chunk in roll_out(drafter, target, batch, positions).chunks(recipe.chunk_rows):
            for i, hidden_nH in enumerate(chunk.hidden_KNH):
                head = drafter.lm_head.at(i)
                ids_nk = head.propose(hidden_nH, i, topk, chunk.route(head, i)).token_ids_Tk
                right_Kk[i] += (ids_nk == next_ids_N1[chunk_rows]).sum(dim=0)
    return (right_Kk / rows).tolist()
