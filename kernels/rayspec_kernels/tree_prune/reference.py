"""The best nodes, by SLiM's score, of the tree that EAGLE-2 expands, and all of their ancestors; in plain torch
without any look at values.

B = requests, C = candidates, M = C + 1 nodes of the whole tree with the root, N = nodes that may stay, the root
included, K = best nodes that are asked for, P = beam entries, W = top-k of the draft loop.

Node 0 is the root and its own parent; parents precede their children. Candidate c of a draft loop
(`common/draft_tree.py` says how it counts) is node c + 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rayspec_kernels.common.draft_tree import link_tree_reference
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import SlimPosterior


class Expansion(NamedTuple):
    """Every candidate that a draft loop of EAGLE-2 scored, as `common/draft_tree.py` counts them."""

    parents_BP: Tensor  # int64
    p_BC: Tensor  # float32: the product of the draft probabilities on a candidate's path
    tokens_BC: Tensor  # int64


class Sizes(NamedTuple):
    candidates: int
    hypotheses: int
    nodes: int


MAX_SIZES = Sizes(candidates=2047, hypotheses=64, nodes=256)  # of the kernel; more than a draft tree asks


def expansion_parents_reference(parents_BP: Tensor, topk: int) -> Tensor:
    """The parent [B, M] of each node of an expansion, from the parents that the draft loop recorded (those of
    `build_tree_reference`; none for one draft step)."""
    if not parents_BP.shape[1]:
        parents_BP = parents_BP.new_full((len(parents_BP), 1), -1)
    return torch.nn.functional.pad((parents_BP + 1).repeat_interleave(topk, dim=1), (1, 0))


def path_sums_reference(parent_BM: Tensor, value_BM: Tensor, depth: int) -> Tensor:
    """The sum [B, M] of the values on the way from the root to each node, itself included; the root's must be 0.
    `depth`: of the deepest node."""
    sum_BM = value_BM
    for _ in range(depth - 1):
        sum_BM = value_BM + sum_BM.gather(1, parent_BM)
    return sum_BM


class PrunedTree(NamedTuple):
    """Node 0 is the root; the others are in the whole tree's order, and what is left of the N is padding."""

    node_BN: Tensor  # int64: which node of the whole tree; -1 for padding
    parent_BN: Tensor  # int64: as `link_tree_reference` takes it; -1 for the root and for padding
    num_nodes_B: Tensor  # int64, the root included


def prune_tree_reference(parent_BM: Tensor, score_BM: Tensor, depth: int, count: int, num_nodes: int) -> PrunedTree:
    """Keep the `count` best nodes and all of their ancestors, whatever the ancestors' scores are.

    As many of the best as fit into `num_nodes` with their ancestors are taken, and no other. Of equal scores the node
    with the lower number is the better one.

    Args:
        score_BM: -inf, +inf or NaN for a node that must not be asked for; the root's is not read.
        depth: of the deepest node.
    """
    B, M = score_BM.shape
    K, device = min(count, M - 1), score_BM.device
    possible_BC = torch.where(score_BM < float("inf"), score_BM, float("-inf"))[:, 1:]
    best = possible_BC.sort(dim=1, descending=True, stable=True)
    is_possible_BK = best.values[:, :K] > float("-inf")
    rank_BK = torch.where(is_possible_BK, torch.arange(K, device=device), K)  # K: of no node that is asked for
    rank_BM = torch.full((B, M), K, device=device).scatter_(1, best.indices[:, :K] + 1, rank_BK)
    for _ in range(depth - 1):  # the best rank of a node and of all below it
        rank_BM = rank_BM.scatter_reduce(1, parent_BM, rank_BM, "amin")

    ones_BM = torch.ones_like(rank_BM)[:, 1:]
    added_BK = torch.zeros(B, K + 1, dtype=torch.int64, device=device).scatter_add_(1, rank_BM[:, 1:], ones_BM)
    fits_BK = added_BK.cumsum(dim=1) < num_nodes
    fits_BK[:, K] = False
    kept_BM = fits_BK.gather(1, rank_BM)
    kept_BM[:, 0] = True

    # the kept ones, in order; column num_nodes takes what is dropped
    place_BM = torch.where(kept_BM, kept_BM.long().cumsum(dim=1) - 1, num_nodes)
    nowhere_BN = torch.full((B, num_nodes + 1), -1, device=device)
    node_BN = nowhere_BN.scatter(1, place_BM, torch.arange(M, device=device).expand(B, M))
    parent_BN = nowhere_BN.scatter(1, place_BM, place_BM.gather(1, parent_BM))
    parent_BN[:, 0] = -1
    return PrunedTree(node_BN[:, :num_nodes], parent_BN[:, :num_nodes], kept_BM.sum(dim=1))


def expansion_scores_reference(
    root_B: Tensor, expansion: Expansion, correlations: Correlations, length_bonus: float, topk: int, depth: int
) -> tuple[Tensor, Tensor]:
    """(log of every node's score, float64 [B, M]; its parent [B, M])."""
    parent_BM = expansion_parents_reference(expansion.parents_BP, topk)
    tokens_BM = torch.cat([root_B[:, None], expansion.tokens_BC], dim=1)
    factor_BM = correlations.of(tokens_BM.gather(1, parent_BM), tokens_BM).double() + length_bonus
    factor_BM[:, 0] = 0.0
    # float64: the logarithms of two different float32 must differ
    log_p_BM = torch.nn.functional.pad(expansion.p_BC.double().log(), (1, 0))
    return path_sums_reference(parent_BM, factor_BM, depth) + log_p_BM, parent_BM


def tree_prune_reference(
    root_B: Tensor,
    expansion: Expansion,
    correlations: Correlations,
    length_bonus: float,
    topk: int,
    depth: int,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    score_BM, parent_BM = expansion_scores_reference(root_B, expansion, correlations, length_bonus, topk, depth)
    tree = prune_tree_reference(parent_BM, score_BM, depth, count, num_nodes)
    tokens_BM = torch.cat([root_B[:, None], expansion.tokens_BC], dim=1)
    tokens_BN = tokens_BM.gather(1, tree.node_BN.clamp(min=0))
    return SlimPosterior(tokens_BN, link_tree_reference(tree.parent_BN, depth), tree.num_nodes_B)
