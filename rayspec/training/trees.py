"""The tree of a trained drafter, made by how good its candidates are.

K = draft positions, N = answer positions, k = candidates of a draft position.
"""

from __future__ import annotations

import torch

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import Recipe
from rayspec.training.tree_config import SlimTreeConfig, StaticTreeConfig, TreeConfig, read_bigram
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.drafters.training import Batch
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimTree
from sglang_ext.trees.static import StaticTree, greedy_paths, read_paths


def given_tree(config: TreeConfig, target: TargetInfo) -> CandidateTree | None:
    """The tree that a `tree` entry asks for, a calibration of it looked for by the target's name; None where it is to
    be found by what a trained drafter gets right. Raises ValueError for a file or calibration that is not there or does
    not fit."""
    if isinstance(config, SlimTreeConfig):
        return slim_tree(config, target)
    return None if config.file is None else StaticTree(read_paths(config.file))


def find_tree(
    config: StaticTreeConfig, drafter: Drafter, target: FrozenTarget, answers: AnswerSet, recipe: Recipe
) -> StaticTree:
    """The tree of a trained drafter where none is given. Raises ValueError where there are not as many nodes."""
    accuracy = rank_accuracy(drafter, target, answers, topk=config.topk, sequences=config.sequences, recipe=recipe)
    return StaticTree(greedy_paths(accuracy, config.nodes - 1))


def slim_tree(config: SlimTreeConfig, target: TargetInfo) -> SlimTree:
    if config.bigram is None:
        return SlimTree(config.options(pairs=0), target.vocab_size)
    indptr, ids_P, counts_P = read_bigram(config.bigram, target)
    return SlimTree.with_counts(config.options(pairs=len(ids_P)), indptr, ids_P, counts_P)


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
