"""DynaSpec's router: scores of the clusters, and the union of the chosen ones as ranges of a list."""

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import joined, parts, uses_kernel
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.router_topk.reference import (
    Router,
    can_halve,
    router_scores_reference,
    union_tiles_reference,
)


@torch.library.custom_op("rayspec::router_scores", mutates_args=())
def _router_scores(
    embed_BH: Tensor,
    feature_BH: Tensor,
    in_values: Tensor,
    in_scales: Tensor | None,
    in_bias_R: Tensor,
    out_values: Tensor,
    out_scales: Tensor | None,
    out_bias_M: Tensor,
    eps: float,
) -> Tensor:
    from rayspec_kernels.router_topk.kernel import router_scores_kernel

    router = Router(joined(in_values, in_scales), in_bias_R, joined(out_values, out_scales), out_bias_M)
    return router_scores_kernel(embed_BH, feature_BH, router, eps)


@_router_scores.register_fake
def _(embed_BH: Tensor, *rest: Tensor) -> Tensor:
    return embed_BH.new_empty(len(embed_BH), len(rest[6]), dtype=torch.float32)


def router_scores(embed_BH: Tensor, feature_BH: Tensor, router: Router, eps: float) -> Tensor:
    """[B, M] in float32, of a router whose matrices have the dtype of the inputs or are quantised."""
    (in_values, in_scales), (out_values, out_scales) = parts(router.in_R2H), parts(router.out_MR)
    biases = router.in_bias_R, router.out_bias_M
    if uses_kernel(embed_BH, feature_BH, in_values, out_values, *biases) and can_halve(router.in_R2H):
        return _router_scores(
            embed_BH, feature_BH, in_values, in_scales, biases[0], out_values, out_scales, biases[1], eps
        )
    return router_scores_reference(embed_BH, feature_BH, router, eps)


@torch.library.custom_op("rayspec::union_tiles", mutates_args=())
def _union_tiles(scores_BM: Tensor, k: int, starts: Tensor, tile: int, num_tiles: int, groups: int) -> list[Tensor]:
    """The ranges and, of several groups, which of them each range is of."""
    from rayspec_kernels.router_topk.kernel import union_tiles_kernel

    ranges_t2, _, is_of_tG = union_tiles_kernel(scores_BM, k, starts, tile, num_tiles, groups)
    return [ranges_t2] if is_of_tG is None else [ranges_t2, is_of_tG]


@_union_tiles.register_fake
def _(scores_BM: Tensor, k: int, starts: Tensor, tile: int, num_tiles: int, groups: int) -> list[Tensor]:
    ranges_t2 = scores_BM.new_empty(num_tiles, 2, dtype=torch.int32)
    return [ranges_t2] if groups == 1 else [ranges_t2, scores_BM.new_empty(num_tiles, groups, dtype=torch.int8)]


def union_tiles(scores_BM: Tensor, k: int, starts: Tensor, tile: int, num_tiles: int, groups: int = 1) -> Tiles:
    """Ranges of the pinned cluster 0 and of the union of each row's k best routed ones.

    Cluster c of the list (see `indexed_head`) is starts[c]..starts[c + 1] - 1, int [M + 2]. The ranges ascend, hold at
    most `tile` candidates each and are `num_tiles` in number, the last ones empty; what does not fit is left out
    (`most_tiles` says how many fit always). Ties between clusters: the lowest. Nothing synchronises.

    `groups` of equally many rows, side by side: each range says which of them have a row that chose its cluster.
    """
    if uses_kernel(scores_BM):
        ranges_t2, *is_of_tG = _union_tiles(scores_BM, k, starts, tile, num_tiles, groups)
        return Tiles(ranges_t2, tile, *is_of_tG)
    return union_tiles_reference(scores_BM, k, starts, tile, num_tiles, groups)
