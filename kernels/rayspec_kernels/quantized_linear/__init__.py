"""Products with a matrix in fewer bits whose results are wanted whole: routers, and heads that draw samples."""

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import joined, uses_kernel
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.quantized_linear.reference import linear_reference


@torch.library.custom_op("rayspec::quantized_linear", mutates_args=())
def _quantized_linear(x_BH: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    from rayspec_kernels.quantized_linear.kernel import linear_kernel

    return linear_kernel(x_BH, joined(values, scales))


@_quantized_linear.register_fake
def _(x_BH: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    return x_BH.new_empty(len(x_BH), len(values))


def quantized_linear(x_BH: Tensor, weight: Quantized) -> Tensor:
    """x W^T [B, N] in the dtype of x, summed in float32 on a GPU. On a CPU, `host.QuantizedLinear` is faster."""
    if uses_kernel(x_BH, weight.values):
        return _quantized_linear(x_BH, *weight)
    return linear_reference(x_BH, weight)
