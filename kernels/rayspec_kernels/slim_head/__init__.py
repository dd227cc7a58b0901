"""SlimSpec's head: down then up projection, fused with the k best and the normaliser."""

import torch
from torch import Tensor

from rayspec_kernels.common.best import MAX_K, Best, fake_best
from rayspec_kernels.common.dispatch import joined, parts, uses_kernel
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.slim_head.reference import slim_head_reference


@torch.library.custom_op("rayspec::slim_head", mutates_args=())
def _slim_head(
    x_BH: Tensor, down: Tensor, down_scales: Tensor | None, up: Tensor, up_scales: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    from rayspec_kernels.slim_head.kernel import slim_head_kernel

    return slim_head_kernel(x_BH, joined(down, down_scales), joined(up, up_scales), k)


@_slim_head.register_fake
def _(
    x_BH: Tensor, down: Tensor, down_scales: Tensor | None, up: Tensor, up_scales: Tensor | None, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_best(x_BH, k)


def slim_head(x_BH: Tensor, down: Tensor | Quantized, up: Tensor | Quantized, k: int) -> Best:
    """The k best of the logits up (down x), x [B, H], down [r, H], up [V, r], with their log-sum-exp.

    Matrices of the dtype of x, or quantised. Ties: the lowest id; NaN counts as the largest.
    """
    (down_values, down_scales), (up_values, up_scales) = parts(down), parts(up)
    if uses_kernel(x_BH, down_values, up_values) and k <= MAX_K:
        return Best(*_slim_head(x_BH, down_values, down_scales, up_values, up_scales, k))
    return slim_head_reference(x_BH, down, up, k)
