"""Dot products of each row with its own chosen rows of a matrix: SpecVocab's rescoring (METHODS 7.1)."""

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.gather_dot.reference import gather_dot_reference


@torch.library.custom_op("rayspec::gather_dot", mutates_args=())
def _gather_dot(x_TH: Tensor, weight_VH: Tensor, ids_Tn: Tensor) -> Tensor:
    from rayspec_kernels.gather_dot.kernel import gather_dot_kernel

    return gather_dot_kernel(x_TH, weight_VH, ids_Tn)


@_gather_dot.register_fake
def _(x_TH: Tensor, weight_VH: Tensor, ids_Tn: Tensor) -> Tensor:
    return x_TH.new_empty(ids_Tn.shape)


def gather_dot(x_TH: Tensor, weight_VH: Tensor, ids_Tn: Tensor) -> Tensor:
    """out[t, j] = weight[ids[t, j]] . x[t], [T, n] in the dtype of x. Ids must be in 0..V-1: others raise IndexError
    on a CPU and give NaN on a GPU."""
    if uses_kernel(x_TH, weight_VH):
        return _gather_dot(x_TH, weight_VH, ids_Tn)
    return gather_dot_reference(x_TH, weight_VH, ids_Tn)
