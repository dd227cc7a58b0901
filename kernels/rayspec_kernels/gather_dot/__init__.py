"""Dot products of each row with its own chosen rows of a matrix: SpecVocab's rescoring."""

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import joined, parts, uses_kernel
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.gather_dot.reference import gather_dot_reference


@torch.library.custom_op("rayspec::gather_dot", mutates_args=())
def _gather_dot(x_TH: Tensor, values: Tensor, scales: Tensor | None, ids_Tn: Tensor) -> Tensor:
    from rayspec_kernels.gather_dot.kernel import gather_dot_kernel

    return gather_dot_kernel(x_TH, joined(values, scales), ids_Tn)


@_gather_dot.register_fake
def _(x_TH: Tensor, values: Tensor, scales: Tensor | None, ids_Tn: Tensor) -> Tensor:
    return x_TH.new_empty(ids_Tn.shape)


def gather_dot(x_TH: Tensor, weight: Tensor | Quantized, ids_Tn: Tensor) -> Tensor:
    """out[t, j] = weight[ids[t, j]] . x[t], [T, n] in the dtype of x, which the weight shares if it is not quantised.
    Ids must be in 0..V-1: others raise IndexError on a CPU and give NaN on a GPU."""
    values, scales = parts(weight)
    if uses_kernel(x_TH, values):
        return _gather_dot(x_TH, values, scales, ids_Tn)
    return gather_dot_reference(x_TH, weight, ids_Tn)
