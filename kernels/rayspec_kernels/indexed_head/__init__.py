"""A head over a set of rows that a batch shares, fused with its k best and normaliser (DynaSpec)."""

import torch
from torch import Tensor

from rayspec_kernels.common.best import MAX_K, Best, fake_best
from rayspec_kernels.common.dispatch import joined, parts, uses_kernel
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference


@torch.library.custom_op("rayspec::indexed_head", mutates_args=())
def _indexed_head(
    x_BH: Tensor,
    values: Tensor,
    scales: Tensor | None,
    ids_L: Tensor,
    k: int,
    ranges_t2: Tensor | None,
    tile: int,
    is_of_tG: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from rayspec_kernels.indexed_head.kernel import indexed_head_kernel

    tiles = None if ranges_t2 is None else Tiles(ranges_t2, tile, is_of_tG)
    return indexed_head_kernel(x_BH, joined(values, scales), ids_L, k, tiles)


@_indexed_head.register_fake
def _(x_BH: Tensor, values: Tensor, scales: Tensor | None, ids_L: Tensor, k: int, *rest: object) -> Best:
    return fake_best(x_BH, k)


def indexed_head(
    x_BH: Tensor,
    weight: Tensor | Quantized,
    ids_L: Tensor,
    k: int,
    tiles: Tiles | None = None,
) -> Best:
    """The k best of the logits of chosen candidates, x [B, H] and W [V, H], and the log-sum-exp over them.

    `ids_L` lists candidates by id, -1 (at its end) for none; `tiles` chooses ranges of the list, for all rows or for
    groups of them, None all of it. The row of a candidate is its id. Ties: the first listed.
    """
    values, scales = parts(weight)
    if uses_kernel(x_BH, values) and k <= MAX_K:
        chosen = (None, 0, None) if tiles is None else tiles
        return Best(*_indexed_head(x_BH, values, scales, ids_L, k, *chosen))
    return indexed_head_reference(x_BH, weight, ids_L, k, tiles)
