"""DynaSpec's router: which clusters of the vocabulary a batch scores, as ranges of a list.

The list holds all tokens cluster by cluster; `starts` says where each cluster begins. Cluster 0 is pinned.
B = rows, H = width, R = width of the router, M = routed clusters, t = ranges, G = groups of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu, rms_norm

from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.quantized_linear.reference import linear_reference


class Router(NamedTuple):
    """s = out relu(in [norm(embedding); norm(feature)] + in_bias) + out_bias, with norm(x) = x / rms(x)."""

    in_R2H: Tensor | Quantized
    in_bias_R: Tensor
    out_MR: Tensor | Quantized
    out_bias_M: Tensor


def can_halve(weight: Tensor | Quantized) -> bool:
    """Whether no group of int4 has columns of both halves."""
    return isinstance(weight, Tensor) or weight.scales.dim() < 3 or weight.scales.shape[1] % 2 == 0


def halves(weight: Tensor | Quantized) -> tuple[Tensor | Quantized, Tensor | Quantized]:
    """The two halves of the columns: what meets the embedding, and what meets the feature."""
    if isinstance(weight, Tensor):
        early, late = weight.tensor_split(2, dim=1)
        return early, late
    if not can_halve(weight):
        raise ValueError(
            f"groups of int4 must not span both halves of a router's inputs, got {weight.scales.shape[1]} groups of "
            f"{2 * weight.values.shape[1]} columns; use a smaller group size"
        )
    early_scales, late_scales = (
        weight.scales.tensor_split(2, dim=1) if weight.scales.dim() == 3 else [weight.scales] * 2
    )
    early, late = weight.values.tensor_split(2, dim=1)
    return Quantized(early, early_scales), Quantized(late, late_scales)


def most_tiles(starts: Tensor, tile: int, clusters: int) -> int:
    """How many ranges the pinned cluster and any `clusters` routed ones can need. Reads values: call it once."""
    needed = -(-starts.diff() // tile)
    return int(needed[0] + needed[1:].sort(descending=True).values[:clusters].sum())


def router_scores_reference(embed_BH: Tensor, feature_BH: Tensor, router: Router, eps: float) -> Tensor:
    """[B, M] in float32 (float64 of float64)."""
    width = (embed_BH.shape[1],)
    x_B2H = torch.cat([rms_norm(embed_BH, width, eps=eps), rms_norm(feature_BH, width, eps=eps)], dim=1)
    hidden_BR = relu(linear_reference(x_B2H, router.in_R2H) + router.in_bias_R)
    scores_BM = linear_reference(hidden_BR, router.out_MR) + router.out_bias_M
    return scores_BM if scores_BM.dtype.itemsize >= 4 else scores_BM.float()


def union_tiles_reference(
    scores_BM: Tensor, k: int, starts: Tensor, tile: int, num_tiles: int, groups: int = 1
) -> Tiles:
    """Ranges of the pinned cluster and of the union of each row's k best ones, ascending; what does not fit into
    `num_tiles` (see `most_tiles`) is left out. Ties between clusters: the lowest. Nothing synchronises.

    `groups` of equally many rows, side by side: each range says which of them have a row that chose its cluster.
    """
    M = scores_BM.shape[1]
    chosen_Bk = scores_BM.sort(dim=1, descending=True, stable=True).indices[:, :k]
    is_of_GM1 = torch.zeros(groups, M + 1, dtype=torch.int64, device=scores_BM.device)
    is_of_GM1[:, 0] = 1
    is_of_GM1.scatter_(1, chosen_Bk.reshape(groups, -1) + 1, 1)

    starts = starts.long()
    needed = is_of_GM1.amax(dim=0) * ((starts.diff() + tile - 1) // tile)
    upto = needed.cumsum(0)
    place_t = torch.arange(num_tiles, device=starts.device)
    cluster_t = torch.searchsorted(upto, place_t, right=True).clamp(max=M)
    first_t = starts[cluster_t] + (place_t - (upto - needed)[cluster_t]) * tile
    count_t = (starts[cluster_t + 1] - first_t).clamp(max=tile)
    is_used_t1 = (place_t < upto[-1])[:, None]
    ranges_t2 = torch.where(is_used_t1, torch.stack([first_t, count_t], dim=1), 0).int()
    if groups == 1:
        return Tiles(ranges_t2, tile)
    return Tiles(ranges_t2, tile, (is_of_GM1[:, cluster_t].T * is_used_t1).to(torch.int8))


def router_topk_reference(
    embed_BH: Tensor,
    feature_BH: Tensor,
    router: Router,
    k: int,
    starts: Tensor,
    tile: int,
    num_tiles: int,
    eps: float,
    groups: int = 1,
) -> tuple[Tensor, Tiles]:
    """(scores [B, M], ranges of the chosen clusters)."""
    scores_BM = router_scores_reference(embed_BH, feature_BH, router, eps)
    return scores_BM, union_tiles_reference(scores_BM, k, starts, tile, num_tiles, groups)
