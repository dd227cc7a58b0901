"""The affinity of rdk: which token stands in for which. V = vocabulary, H = hidden, J = neighbours, N = states."""

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.heads.base import DraftHead

AFFINITY_TEMPERATURE = 0.1
MAX_PAIRS = 32  # likeliest tokens of each distribution of a row whose pairs are counted
_CHUNK = 1024


def nearest_tokens(weight_VH: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids [V, J], weights [V, J]) of each token's nearest other tokens by the cosine of their rows, less the mean row:
    a softmax ignores what is common to all of them, which a cosine is mostly made of."""
    weight_VH = weight_VH.float()
    unit_VH = F.normalize(weight_VH - weight_VH.mean(dim=0), dim=1)
    ids, weights = [], []
    for start in range(0, len(unit_VH), _CHUNK):
        cosine_nV = unit_VH[start : start + _CHUNK] @ unit_VH.T
        rows_n = torch.arange(len(cosine_nV))
        cosine_nV[rows_n, rows_n + start] = -2.0  # itself
        best = cosine_nV.topk(count, dim=1)
        ids.append(best.indices)
        weights.append((best.values / AFFINITY_TEMPERATURE).softmax(dim=1))
    return torch.cat(ids), torch.cat(weights)


@torch.no_grad()
def count_affinity(base: DraftHead, weight_VH: Tensor, states_NH: Tensor, count: int) -> dict[str, Tensor]:
    """The counted affinity of a base to the full head `weight_VH` along states, by the names of `RdkHead`'s tensors.

    With q the base's distribution of a row and l the full head's outside of its support: a token v hands on
    E[q(v) sum_u l(u)] / E[q(v)], to u by E[q(v) l(u)], both over the rows. Pairs are counted between the likeliest
    tokens of either distribution; `fallback` is E[l] less what they hold. A token that is never proposed keeps
    everything.
    """
    V = base.vocab_size
    proposed_V, shared_V, lost_V = (torch.zeros(V) for _ in range(3))
    pairs = torch.sparse_coo_tensor(
        torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (V, V), check_invariants=False
    )
    most = min(MAX_PAIRS, V)
    for states_nH in states_NH.float().split(_CHUNK // 4):
        q_nV = base.float().target_distribution(states_nH, 0)
        l_nV = torch.where(q_nV > 0, 0.0, (states_nH @ weight_VH.float().T).softmax(dim=-1))
        lost_n = l_nV.sum(dim=1)
        proposed_V += q_nV.sum(dim=0)
        shared_V += lost_n @ q_nV
        lost_V += l_nV.sum(dim=0)
        (q_nk, from_nk), (l_nk, to_nk) = q_nV.topk(most), l_nV.topk(most)
        cells = torch.stack(torch.broadcast_tensors(from_nk[:, :, None], to_nk[:, None, :])).flatten(1)
        found = torch.sparse_coo_tensor(
            cells, (q_nk[:, :, None] * l_nk[:, None, :]).flatten(), (V, V), check_invariants=False
        )
        pairs = (pairs + found).coalesce()
    from_P, to_P = pairs.indices()
    # the largest of each row: sorted by size, then stably by row, in which they have the places 0, 1, ...
    order_P = pairs.values().argsort(descending=True)
    order_P = order_P[from_P[order_P].argsort(stable=True)]
    from_P, to_P, value_P = from_P[order_P], to_P[order_P], pairs.values()[order_P]
    place_P = torch.arange(len(from_P)) - torch.searchsorted(from_P, from_P)
    is_kept = place_P < count
    from_P, to_P, value_P, place_P = from_P[is_kept], to_P[is_kept], value_P[is_kept], place_P[is_kept]
    ids_VJ = torch.arange(V)[:, None].repeat(1, count)  # itself, with no weight, where fewer were met
    ids_VJ[from_P, place_P] = to_P
    weights_VJ = torch.zeros(V, count)
    weights_VJ[from_P, place_P] = value_P / shared_V[from_P].clamp(min=torch.finfo(torch.float32).tiny)
    rest_V = (lost_V - torch.zeros(V).index_add_(0, to_P, value_P)).clamp(min=0)
    rest_V = rest_V if bool(rest_V.any()) else torch.ones(V)  # nothing is left to hand on
    handed_V = shared_V / proposed_V.clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "neighbour_ids": ids_VJ,
        "neighbour_weights": weights_VJ,
        "kept_share": (1 - handed_V).clamp(0, 1),
        "fallback": rest_V / rest_V.sum(),
    }
