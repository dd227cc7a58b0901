"""DynaSpec's router: scores of the clusters, and the union of the chosen ones as ranges of a list (METHODS 7.3)."""

from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.router_topk.reference import Router, router_topk_reference


@torch.library.custom_op("rayspec::router_topk", mutates_args=())
def _router_topk(
    embed_BH: Tensor,
    feature_BH: Tensor,
    in_R2H: Tensor,
    in_bias_R: Tensor,
    out_MR: Tensor,
    out_bias_M: Tensor,
    k: int,
    starts: Tensor,
    tile: int,
    num_tiles: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from rayspec_kernels.router_topk.kernel import router_topk_kernel

    router = Router(in_R2H, in_bias_R, out_MR, out_bias_M)
    scores_BM, tiles = router_topk_kernel(embed_BH, feature_BH, router, k, starts, tile, num_tiles, eps)
    return scores_BM, tiles.ranges_t2


@_router_topk.register_fake
def _(embed_BH: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out_MR, num_tiles = rest[3], rest[8]
    scores_BM = embed_BH.new_empty(len(embed_BH), len(out_MR), dtype=torch.float32)
    return scores_BM, embed_BH.new_empty(num_tiles, 2, dtype=torch.int32)


def router_topk(
    embed_BH: Tensor,
    feature_BH: Tensor,
    router: Router,
    k: int,
    starts: Tensor,
    tile: int,
    num_tiles: int,
    eps: float,
) -> tuple[Tensor, Tiles]:
    """(scores float32 [B, M], ranges of the pinned cluster 0 and of the union of each row's k best routed ones).

    Cluster c of the list (see `indexed_head`) is starts[c]..starts[c + 1] - 1, int [M + 2]. The ranges ascend, hold at
    most `tile` candidates each and are `num_tiles` in number, the last ones empty; what does not fit is left out
    (`most_tiles` says how many fit always). Ties between clusters: the lowest. Nothing synchronises.
    """
    if uses_kernel(embed_BH, *router):
        scores_BM, ranges_t2 = _router_topk(embed_BH, feature_BH, *router, k, starts, tile, num_tiles, eps)
        return scores_BM, Tiles(ranges_t2, tile)
    return router_topk_reference(embed_BH, feature_BH, router, k, starts, tile, num_tiles, eps)
