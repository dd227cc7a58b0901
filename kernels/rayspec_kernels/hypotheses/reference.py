"""The K best token sequences of a chain-structured score, of all lengths, and the tree that they and their beginnings
make (METHODS 9: SLiM), in plain torch without any look at values.

B = requests, D = draft positions, k = candidates of a position, K = hypotheses, N = tree nodes with the root.
A hypothesis is named by its ranks: which candidate it takes at each of the first positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Hypotheses(NamedTuple):
    """Best first."""

    scores_BK: Tensor  # float; -inf where there are fewer than K that are possible
    ranks_BKD: Tensor  # int64; -1 after the end, and everywhere where the score is -inf


def best_hypotheses_reference(unary_BDk: Tensor, pair_BEkk: Tensor, length_bonus: float, count: int) -> Hypotheses:
    """List-Viterbi: exact, because the `count` best sequences that end in a candidate are continuations of the `count`
    best that end in some candidate before it.

    Args:
        unary_BDk: score of each candidate at its position; -inf for an impossible one.
        pair_BEkk: E = D - 1; score of candidate s of position e followed by candidate t of position e + 1, [.., s, t].
        length_bonus: added for every token of a sequence.
    """
    B, D, k = unary_BDk.shape
    scores_BkL = unary_BDk[:, 0, :, None] + length_bonus  # the L best that end in a candidate
    ranks_BkLd = torch.arange(k, device=unary_BDk.device)[:, None, None].expand(B, k, 1, 1)
    all_scores, all_ranks = [], []
    for d in range(D):
        if d:
            L = scores_BkL.shape[2]
            extended_BtM = (scores_BkL[:, :, :, None] + pair_BEkk[:, d - 1, :, None, :]).flatten(1, 2).transpose(1, 2)
            best = (extended_BtM + (unary_BDk[:, d, :, None] + length_bonus)).topk(min(count, k * L), dim=2)
            scores_BkL = best.values
            before_BtLd = ranks_BkLd.flatten(1, 2)[:, None].expand(-1, k, -1, -1)
            before_BtLd = before_BtLd.gather(2, best.indices[..., None].expand(-1, -1, -1, d))
            own_Bt11 = torch.arange(k, device=unary_BDk.device)[:, None, None].expand(B, k, scores_BkL.shape[2], 1)
            ranks_BkLd = torch.cat([before_BtLd, own_Bt11], dim=3)
        all_scores.append(scores_BkL.flatten(1))
        all_ranks.append(torch.nn.functional.pad(ranks_BkLd.flatten(1, 2), (0, D - 1 - d), value=-1))
    scores_BM, ranks_BMD = torch.cat(all_scores, dim=1), torch.cat(all_ranks, dim=1)
    best = scores_BM.topk(min(count, scores_BM.shape[1]), dim=1)
    ranks_BKD = ranks_BMD.gather(1, best.indices[..., None].expand(-1, -1, D))
    return Hypotheses(best.values, ranks_BKD.masked_fill(best.values[..., None] == float("-inf"), -1))


class HypothesisTree(NamedTuple):
    """Node 0 is the root; nodes are sorted by (depth, ranks), and what is left of the N is padding."""

    parent_BN: Tensor  # int64; -1 for the root and for padding
    depth_BN: Tensor  # int64; 0 for the root and for padding
    rank_BN: Tensor  # int64; the candidate's rank at its position, 0 for the root and for padding
    num_nodes_B: Tensor  # int64, the root included


def hypothesis_tree_reference(ranks_BKD: Tensor, candidates: int, num_nodes: int) -> HypothesisTree:
    """The tree of the hypotheses and all of their beginnings, each node once.

    As many of the best hypotheses as fit into `num_nodes` with all of their beginnings are taken, and no other.
    `candidates`: how many ranks there are; (candidates + 1) ** D * D must be below 2 ** 63.
    """
    B, K, D = ranks_BKD.shape
    base, device = candidates + 1, ranks_BKD.device
    assert base**D * (D + 1) < 2**62, "a node's number must fit into 64 bits"
    none = base**D * (D + 1)  # larger than the number of any node
    # a node's number: its depth, then its ranks + 1 as digits, 0 after the end
    digit_D = base ** torch.arange(D - 1, -1, -1, device=device)
    number_BKD = ((ranks_BKD + 1) * digit_D).cumsum(dim=2)
    depth_D = torch.arange(1, D + 1, device=device)
    number_BKD = torch.where(ranks_BKD >= 0, depth_D * base**D + number_BKD, none)

    # equal numbers side by side, that of the best hypothesis first
    sorted_BM, order_BM = number_BKD.flatten(1).sort(dim=1, stable=True)
    is_first_BM = torch.ones_like(sorted_BM, dtype=torch.bool)
    is_first_BM[:, 1:] = sorted_BM[:, 1:] != sorted_BM[:, :-1]
    is_first_BM &= sorted_BM < none
    hypothesis_BM = order_BM // D
    added_BK = torch.zeros(B, K, dtype=torch.int64, device=device).scatter_add_(1, hypothesis_BM, is_first_BM.long())
    fits_BK = added_BK.cumsum(dim=1) < num_nodes
    kept_BM = is_first_BM & fits_BK.gather(1, hypothesis_BM)

    # the kept ones, in order, behind the root, whose number is 0; column num_nodes takes what is dropped
    place_BM = torch.where(kept_BM, kept_BM.long().cumsum(dim=1), num_nodes)
    number_BN = torch.full((B, num_nodes + 1), none, device=device).scatter_(1, place_BM, sorted_BM)
    number_BN = number_BN[:, :num_nodes].contiguous()
    number_BN[:, 0] = 0
    is_node_BN = number_BN < none
    depth_BN = torch.where(is_node_BN, number_BN // base**D, 0)
    weight_BN = digit_D[(depth_BN - 1).clamp(min=0)]
    last_BN = torch.where(depth_BN > 0, number_BN // weight_BN % base, 1)
    before_BN = torch.where(depth_BN > 1, number_BN - base**D - last_BN * weight_BN, 0)
    parent_BN = torch.searchsorted(number_BN, before_BN)
    return HypothesisTree(parent_BN.masked_fill(depth_BN == 0, -1), depth_BN, last_BN - 1, is_node_BN.sum(dim=1))
