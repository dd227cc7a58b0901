"""The k best tokens of a dense head, in floating point or in fewer bits, fused with its normaliser."""

import torch
from torch import Tensor

from rayspec_kernels.common.best import MAX_K, Best, fake_best
from rayspec_kernels.common.dispatch import joined, parts, uses_kernel
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.head_topk.reference import head_topk_reference


@torch.library.custom_op("rayspec::head_topk", mutates_args=())
def _head_topk(
    x_BH: Tensor, values: Tensor, scales: Tensor | None, k: int, ids_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from rayspec_kernels.head_topk.kernel import head_topk_kernel

    return head_topk_kernel(x_BH, joined(values, scales), k, ids_V)


@_head_topk.register_fake
def _(
    x_BH: Tensor, values: Tensor, scales: Tensor | None, k: int, ids_V: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_best(x_BH, k)


def head_topk(x_BH: Tensor, weight: Tensor | Quantized, k: int, ids_V: Tensor | None = None) -> Best:
    """The k best of the logits x W^T, x [B, H] and W [V, H] of one dtype or W quantised, with their log-sum-exp.

    `ids_V` names the candidates (None: by their row). Ties: the first row; NaN counts as the largest.
    """
    values, scales = parts(weight)
    if uses_kernel(x_BH, values) and k <= MAX_K:
        return Best(*_head_topk(x_BH, values, scales, k, ids_V))
    return head_topk_reference(x_BH, weight, k, ids_V)
