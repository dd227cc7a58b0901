"""y = x W^T for few rows and a matrix in floating point or in fewer bits, dequantised in registers.

A small matrix (the projection in front of a fused head) is cut into tiles as short as tensor cores allow (16 rows),
also along the batch: 4 MiB otherwise occupy a fifth of the chip. B = rows, N = outputs, H = width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.rows_dot import Operand, choose_tiling, rows_dot

_SHORTEST = 16  # tile


@triton.jit(do_not_specialize=["B", "N"])
def _linear_kernel(x_ptr, weight_ptr, scale_ptr, y_ptr, B, N, H, stride_x, stride_w, stride_s,
                   FORMAT: tl.constexpr, GROUP: tl.constexpr, EVEN_H: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc_NB = rows_dot(x_ptr, weight_ptr, scale_ptr, b_B, b_B < B, row_N, row_N < N, H, stride_x, stride_w, stride_s,
                      FORMAT, GROUP, EVEN_H, BLOCK_N, BLOCK_B, BLOCK_H)  # fmt: skip
    y_ptrs = y_ptr + b_B.to(tl.int64)[None, :] * N + row_N[:, None]
    tl.store(y_ptrs, acc_NB.to(y_ptr.dtype.element_ty), mask=(row_N[:, None] < N) & (b_B[None, :] < B))


def linear_kernel(x_BH: Tensor, weight: Tensor | Quantized) -> Tensor:
    """[B, N] in the dtype of x. Raises ValueError for layouts it does not take."""
    operand, (B, H) = Operand.of(weight, x_BH), x_BH.shape
    N = len(operand.values)
    tiling = choose_tiling(operand, x_BH, N)
    if tiling.rows == _SHORTEST:
        tiling = choose_tiling(operand, x_BH[:_SHORTEST], N, exactly=_SHORTEST)
    y_BN = torch.empty(B, N, dtype=x_BH.dtype, device=x_BH.device)
    _linear_kernel[(triton.cdiv(B, tiling.batch), triton.cdiv(N, tiling.rows))](
        x_BH, operand.values, operand.scales, y_BN, B, N, H, x_BH.stride(0), operand.values.stride(0),
        operand.scales.stride(0),
        FORMAT=operand.format, GROUP=operand.group, EVEN_H=H % tiling.width == 0,
        BLOCK_N=tiling.rows, BLOCK_B=tiling.batch, BLOCK_H=tiling.width,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y_BN
