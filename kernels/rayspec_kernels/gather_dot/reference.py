"""Dot products with chosen rows of a matrix. T = rows, n = choices a row, H = width, V = rows of the matrix."""

import torch
from torch import Tensor


def gather_dot_reference(x_TH: Tensor, weight_VH: Tensor, ids_Tn: Tensor) -> Tensor:
    """out[t, j] = weight[ids[t, j]] . x[t], [T, n] in the dtype of x; every id must be in 0..V-1."""
    # faster than advanced indexing
    rows_TnH = weight_VH.index_select(0, ids_Tn.flatten()).view(*ids_Tn.shape, weight_VH.shape[1])
    # x on the left: on a CPU several times faster than rows x for more than one row
    return torch.bmm(x_TH.unsqueeze(1), rows_TnH.transpose(1, 2)).squeeze(1)
