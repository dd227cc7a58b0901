"""SLiM on the tree that EAGLE-2 expands: which of its scored candidates are verified.

EAGLE-2 scores a node by the draft probabilities on its path; SLiM multiplies r of every pair of neighbours on it, from
the root's token on, and its factor for length (slim.py). B = requests, C = candidates, M = C + 1 nodes with the root,
N = nodes that are verified.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.tree_build.reference import link_tree_reference
from rayspec_kernels.tree_prune.reference import (
    expansion_parents_reference,
    path_sums_reference,
    prune_tree_reference,
)
from sglang_ext.trees.base import Draft, Expansion, Pruner

if TYPE_CHECKING:
    from sglang_ext.trees.slim import SlimOptions


class SlimPruner(Pruner):
    """Nodes are numbered as EAGLE-2 numbers its own."""

    def __init__(
        self, settings: SlimOptions, correlations: Correlations, draft_steps: int, topk: int, num_nodes: int
    ) -> None:
        self.settings, self.correlations = settings, correlations
        self.draft_steps, self.topk, self.num_nodes = draft_steps, topk, num_nodes

    def scores(self, root_B: Tensor, expansion: Expansion) -> tuple[Tensor, Tensor]:
        """(log of every node's score, float64 [B, M]; its parent [B, M])."""
        parent_BM = expansion_parents_reference(expansion.parents_BP, self.topk)
        tokens_BM = torch.cat([root_B[:, None], expansion.tokens_BC], dim=1)
        factor_BM = self.correlations.of(tokens_BM.gather(1, parent_BM), tokens_BM).double()
        factor_BM += self.settings.length_bonus
        factor_BM[:, 0] = 0.0
        # float64: the logarithms of two different float32 must differ
        log_p_BM = torch.nn.functional.pad(expansion.p_BC.double().log(), (1, 0))
        return path_sums_reference(parent_BM, factor_BM, self.draft_steps) + log_p_BM, parent_BM

    def prune(self, root_B: Tensor, expansion: Expansion) -> Draft:
        score_BM, parent_BM = self.scores(root_B, expansion)
        tree = prune_tree_reference(parent_BM, score_BM, self.draft_steps, self.settings.hypotheses, self.num_nodes)
        tokens_BM = torch.cat([root_B[:, None], expansion.tokens_BC], dim=1)
        tokens_BN = tokens_BM.gather(1, tree.node_BN.clamp(min=0))
        return Draft(tokens_BN, link_tree_reference(tree.parent_BN, self.draft_steps), tree.num_nodes_B)
