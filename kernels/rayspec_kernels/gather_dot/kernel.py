"""Dot products with chosen rows of a matrix, read where they lie. T = rows, n = choices, H = width, V = rows of W.

Each row of x has its own choices, so nothing is shared and nothing is left for tensor cores: a program multiplies a
few whole rows of W with one row of x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.gemv import columns_at_a_time, gemv
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.rows_dot import Operand, aligned

_ROWS = 8  # rows of W a program: 256 programs for 2048 choices


@triton.jit
def _gather_dot_kernel(x_ptr, weight_ptr, scale_ptr, ids_ptr, out_ptr, n, V, H,
                       stride_x, stride_w, stride_s, stride_ids,
                       FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
                       BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # of which there may be more than the second axis has room for
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    id_N = tl.load(ids_ptr + row * stride_ids + n_N, mask=n_N < n, other=0).to(tl.int64)
    is_id_N = (id_N >= 0) & (id_N < V)
    out_N = gemv(x_ptr + row * aligned(stride_x, ALIGN), weight_ptr, scale_ptr, id_N, is_id_N, H, stride_w, stride_s,
                 FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_N, BLOCK_H)  # fmt: skip
    # an id outside of the matrix cannot raise here as it does in torch; what it gives is no number at least
    out_N = tl.where(is_id_N, out_N, float("nan"))
    tl.store(out_ptr + row * n + n_N, out_N.to(out_ptr.dtype.element_ty), mask=n_N < n)


def gather_dot_kernel(x_TH: Tensor, weight: Tensor | Quantized, ids_Tn: Tensor) -> Tensor:
    """Like the reference, but that an id out of 0..V-1 gives NaN. Raises ValueError for layouts it does not take."""
    if ids_Tn.dim() != 2 or len(ids_Tn) != len(x_TH) or (ids_Tn.stride(1) != 1 and ids_Tn.numel()):
        raise ValueError(
            f"ids must have two dimensions, the {len(x_TH)} rows of x and contiguous columns, got shape "
            f"{tuple(ids_Tn.shape)} with strides {ids_Tn.stride()}; call .contiguous() on it"
        )
    (T, n), H = ids_Tn.shape, x_TH.shape[1]
    out_Tn = torch.empty(T, n, dtype=x_TH.dtype, device=x_TH.device)
    if out_Tn.numel() == 0:
        return out_Tn
    operand = Operand.of(weight, x_TH)
    width = columns_at_a_time(operand.format, _ROWS, H)
    _gather_dot_kernel[(T, triton.cdiv(n, _ROWS))](
        x_TH, operand.values, operand.scales, ids_Tn, out_Tn, n, len(operand.values), H,
        x_TH.stride(0), operand.values.stride(0), operand.scales.stride(0), ids_Tn.stride(0),
        FORMAT=operand.format, GROUP=operand.group, ALIGN=operand.alignment(x_TH),
        EVEN_H=H % width == 0, BLOCK_N=_ROWS, BLOCK_H=width, num_warps=4,
    )  # fmt: skip
    return out_Tn
