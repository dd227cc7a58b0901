"""RMSNorm of each group of columns alone, with its gradient (SpecFormer)."""

from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.grouped_rmsnorm.reference import grouped_rmsnorm_reference


@torch.library.custom_op("rayspec::grouped_rmsnorm", mutates_args=())
def _grouped_rmsnorm(x_NC: Tensor, weight_C: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    from rayspec_kernels.grouped_rmsnorm.kernel import grouped_rmsnorm_kernel

    return grouped_rmsnorm_kernel(x_NC, weight_C, groups, eps)


@torch.library.custom_op("rayspec::grouped_rmsnorm_backward", mutates_args=())
def _grouped_rmsnorm_backward(
    dy_NC: Tensor, x_NC: Tensor, weight_C: Tensor, inverse_NG: Tensor
) -> tuple[Tensor, Tensor]:
    from rayspec_kernels.grouped_rmsnorm.kernel import grouped_rmsnorm_backward_kernel

    return grouped_rmsnorm_backward_kernel(dy_NC, x_NC, weight_C, inverse_NG)


@_grouped_rmsnorm.register_fake
def _(x_NC: Tensor, weight_C: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
    return x_NC.new_empty(x_NC.shape), x_NC.new_empty(len(x_NC), groups, dtype=sums)


@_grouped_rmsnorm_backward.register_fake
def _(dy_NC: Tensor, x_NC: Tensor, weight_C: Tensor, inverse_NG: Tensor) -> tuple[Tensor, Tensor]:
    return x_NC.new_empty(x_NC.shape), weight_C.new_empty(weight_C.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.mark_non_differentiable(output[1])


def _gradient(ctx: Any, dy_NC: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
    x_NC, weight_C, inverse_NG = ctx.saved_tensors
    return *_grouped_rmsnorm_backward(dy_NC.contiguous(), x_NC, weight_C, inverse_NG), None, None


_grouped_rmsnorm.register_autograd(_gradient, setup_context=_save)


def grouped_rmsnorm(x_NC: Tensor, weight_C: Tensor, groups: int, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2 over the group) + eps) * weight for each of `groups` equal slices of the C columns.

    x [N, C], weight [C]; y in the dtype of x. Differentiable once in x and weight.
    """
    if uses_kernel(x_NC.detach(), weight_C.detach()):  # this kernel has a gradient
        return _grouped_rmsnorm(x_NC, weight_C, groups, eps)[0]
    return grouped_rmsnorm_reference(x_NC, weight_C, groups, eps)
