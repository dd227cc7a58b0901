"""SLiM's tree: the K best hypotheses of all lengths and all of their beginnings, in plain torch without any
look at values.

B = requests, D = draft positions, k = candidates of a position, K = hypotheses, L = those kept that end in the same
candidate, N = tree nodes with the root.

A hypothesis takes a candidate at each of the first positions. It has the number of its last node in the tree of all
hypotheses, counted level by level: the root is 0, and the children of node n are n k + 1 .. n k + k. Of equal scores
- the shorter hypothesis is the better one, then the one whose last candidate has the lower rank;
- of the same length and last candidate, the one whose last candidate but one has the lower rank;
- where that is the same too, the one whose beginning up to there is the better one. (On a CPU the ranks go on to decide
  instead, which differs where two beginnings are equal but for rounding.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree, link_tree_reference
from rayspec_kernels.slim_posterior.correlations import Correlations

_NO_NODE = 2**62


class Sizes(NamedTuple):
    positions: int
    candidates: int
    hypotheses: int
    nodes: int


MAX_SIZES = Sizes(positions=8, candidates=16, hypotheses=64, nodes=256)  # of the kernel; more than a draft tree asks


class SlimPosterior(NamedTuple):
    """Nodes are sorted by (depth, ranks on the path); what is left of the N is padding, linked to nothing."""

    tokens_BN: Tensor  # int64; the root's for padding
    links: DraftTree
    num_nodes_B: Tensor  # int64, the root included


def slim_posterior_reference(
    root_B: Tensor,
    ids_BDk: Tensor,
    log_p_BDk: Tensor,
    correlations: Correlations,
    length_bonus: float,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    before_BDk = torch.cat([root_B[:, None, None].expand(-1, 1, ids_BDk.shape[2]), ids_BDk[:, :-1]], dim=1)
    pair_BDkk = correlations.of(before_BDk[:, :, None, :], ids_BDk[:, :, :, None])
    own_BDk = log_p_BDk + (length_bonus + 0.0)  # no score is -0, which would rank below 0
    best = best_hypotheses_reference(own_BDk, pair_BDkk, count)
    return hypothesis_tree_reference(best.number_BK, root_B, ids_BDk, num_nodes)


class Hypotheses(NamedTuple):
    """Best first."""

    scores_BK: Tensor  # float32; -inf where there are fewer than K that are possible
    number_BK: Tensor  # int64; 0, the root's, where the score is -inf


def best_hypotheses_reference(own_BDk: Tensor, pair_BDkk: Tensor, count: int) -> Hypotheses:
    """List-Viterbi: exact, because the `count` best hypotheses that end in a candidate are continuations of the `count`
    best that end in some candidate before it. A hypothesis with a NaN or +inf in its score is impossible.

    Args:
        own_BDk: score of each candidate at its position, float32; -inf for an impossible one.
        pair_BDkk: score of candidate t after candidate s of the position before, float32 [.., t, s]; at the first
            position after the root, whatever s is.
    """
    k = own_BDk.shape[2]
    own_BDk, pair_BDkk = _possible(own_BDk), _possible(pair_BDkk)
    first_k1 = torch.arange(1, k + 1, device=own_BDk.device)[:, None]
    scores_BkL = pair_BDkk[:, 0, :, :1] + own_BDk[:, 0, :, None]
    number_BkL = first_k1.expand_as(scores_BkL)
    scores, numbers = [scores_BkL.flatten(1)], [number_BkL.flatten(1)]
    for d in range(1, own_BDk.shape[1]):
        extended_BkM = (scores_BkL[:, None] + pair_BDkk[:, d, :, :, None]).flatten(2) + own_BDk[:, d, :, None]
        place_BkL = _best_places(extended_BkM, count)
        scores_BkL = extended_BkM.gather(2, place_BkL)
        number_BkL = numbers[-1][:, None].expand(-1, k, -1).gather(2, place_BkL) * k + first_k1
        scores.append(scores_BkL.flatten(1))
        numbers.append(number_BkL.flatten(1))
    scores_BM = torch.cat(scores, dim=1)
    place_BK = _best_places(scores_BM, count)
    scores_BK = scores_BM.gather(1, place_BK)
    number_BK = torch.cat(numbers, dim=1).gather(1, place_BK)
    return Hypotheses(scores_BK, number_BK.masked_fill(scores_BK == float("-inf"), 0))


def _possible(scores: Tensor) -> Tensor:
    return torch.where(scores < float("inf"), scores, float("-inf"))


def _best_places(scores: Tensor, count: int) -> Tensor:
    """Along the last dimension, best first; of equal scores the first. (topk leaves that open, and a stable sort of all
    takes several times as long.)"""
    assert scores.dtype == torch.float32, "a key has 32 bits for a score"
    bits = scores.view(torch.int32)
    sorting = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # int32 that sorts as the float32
    n = scores.shape[-1]
    key = (sorting.long() << 32) - torch.arange(n, device=scores.device)
    return key.topk(min(count, n), dim=-1).indices


def hypothesis_tree_reference(number_BK: Tensor, root_B: Tensor, ids_BDk: Tensor, num_nodes: int) -> SlimPosterior:
    """As many of the best hypotheses as fit into `num_nodes` with all of their beginnings are taken, and no other."""
    (B, D, k), K, device = ids_BDk.shape, number_BK.shape[1], number_BK.device
    assert 2 * k**D < _NO_NODE, "a node's number must fit into 64 bits"
    power_d = k ** torch.arange(D + 1, device=device)
    start_d = power_d.cumsum(0) - power_d  # the first number of each level

    # equal beginnings side by side, that of the best hypothesis first
    path_BKd = ((number_BK[:, :, None] - start_d) // power_d).clamp(min=0)
    sorted_BM, order_BM = path_BKd.flatten(1).sort(dim=1, stable=True)
    is_first_BM = torch.ones_like(sorted_BM, dtype=torch.bool)
    is_first_BM[:, 1:] = sorted_BM[:, 1:] != sorted_BM[:, :-1]
    hypothesis_BM = order_BM // (D + 1)
    added_BK = torch.zeros(B, K, dtype=torch.int64, device=device).scatter_add_(1, hypothesis_BM, is_first_BM.long())
    fits_BK = added_BK.cumsum(dim=1) <= num_nodes
    kept_BM = is_first_BM & fits_BK.gather(1, hypothesis_BM)
    kept_BM[:, 0] = True  # the root

    # the kept ones, in order; column num_nodes takes what is dropped
    place_BM = torch.where(kept_BM, kept_BM.cumsum(dim=1) - 1, num_nodes)
    number_BN = torch.full((B, num_nodes + 1), _NO_NODE, device=device).scatter_(1, place_BM, sorted_BM)
    number_BN = number_BN[:, :num_nodes].contiguous()
    has_parent_BN = (number_BN > 0) & (number_BN < _NO_NODE)
    before_BN = number_BN - 1
    parent_BN = torch.where(has_parent_BN, torch.searchsorted(number_BN, before_BN // k), -1)
    position_BN = torch.bucketize(number_BN, start_d[2:], right=True)
    tokens_B1 = torch.cat([root_B[:, None], ids_BDk.flatten(1)], dim=1)
    tokens_BN = tokens_B1.gather(1, torch.where(has_parent_BN, 1 + position_BN * k + before_BN % k, 0))
    return SlimPosterior(tokens_BN, link_tree_reference(parent_BN, D), kept_BM.sum(dim=1))
