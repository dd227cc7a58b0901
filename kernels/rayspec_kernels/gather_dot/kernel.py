"""Dot products with chosen rows of a matrix, read where they lie. T = rows, n = choices, H = width, V = rows of W,
G = groups of int4.

Each row of x has its own choices, so nothing is shared and nothing is left for tensor cores: a program multiplies a
few whole rows of W with one row of x. Weights in fewer bits become float32 in registers; their scales meet sums, of a
row at the end and of a group of int4 as soon as it is read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.rows_dot import Operand, scale_and_offset

_ROWS = 8  # of W a program: 256 programs for 2048 choices
_COLUMNS = {"plain": 512, "int8": 1024, "fp8": 1024, "int4": 2048}  # at a time: 8 KiB of bfloat16 or fewer bits


@triton.jit
def _gather_dot_kernel(x_ptr, weight_ptr, scale_ptr, ids_ptr, out_ptr, n, V, H,
                       stride_x, stride_w, stride_s, stride_ids, FORMAT: tl.constexpr, GROUP: tl.constexpr,
                       EVEN_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    id_N = tl.load(ids_ptr + row * stride_ids + n_N, mask=n_N < n, other=0).to(tl.int64)  # id * stride passes 2^31
    is_id_N = (id_N >= 0) & (id_N < V)
    x_row_ptr, weight_rows_ptr = x_ptr + row * stride_x, weight_ptr + id_N * stride_w
    scale_rows_ptr = scale_ptr + id_N * stride_s
    h_H = tl.arange(0, BLOCK_H)
    # pipelining is asked for, since the compiler does it only for dots by itself
    if FORMAT == "int4":
        GROUPS: tl.constexpr = BLOCK_H // GROUP
        byte_P, g_G = tl.arange(0, BLOCK_H // 2), tl.arange(0, GROUPS)
        sum_NG = tl.zeros((BLOCK_N, GROUPS), tl.float32)
        for h in tl.range(0, H, BLOCK_H, num_stages=3):
            is_w_NP, is_g_NG = is_id_N[:, None], is_id_N[:, None]
            if EVEN_H:
                x_H = tl.load(x_row_ptr + h + h_H)
            else:
                x_H = tl.load(x_row_ptr + h + h_H, mask=h + h_H < H, other=0.0)
                is_w_NP = is_w_NP & (h + 2 * byte_P < H)[None, :]
                is_g_NG = is_g_NG & (h + GROUP * g_G < H)[None, :]
            two_NP = tl.load(weight_rows_ptr[:, None] + h // 2 + byte_P[None, :], mask=is_w_NP, other=0)
            pair_NG = tl.load(scale_rows_ptr[:, None] + h // GROUP + g_G[None, :], mask=is_g_NG, other=0)
            even_P, odd_P = tl.split(tl.reshape(x_H.to(tl.float32), (BLOCK_H // 2, 2)))
            low_NP, high_NP = (two_NP & 15).to(tl.float32), (two_NP >> 4).to(tl.float32)
            product_NP = low_NP * even_P[None, :] + high_NP * odd_P[None, :]
            part_NG = tl.sum(tl.reshape(product_NP, (BLOCK_N, GROUPS, GROUP // 2)), axis=2)
            x_G = tl.sum(tl.reshape(even_P + odd_P, (GROUPS, GROUP // 2)), axis=1)
            scale_NG, offset_NG = scale_and_offset(pair_NG)
            sum_NG += scale_NG * part_NG + offset_NG * x_G[None, :]
        out_N = tl.sum(sum_NG, axis=1)
    else:
        product_NH = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
        for h in tl.range(0, H, BLOCK_H, num_stages=3):
            is_w_NH = is_id_N[:, None]
            if EVEN_H:
                x_H = tl.load(x_row_ptr + h + h_H)
            else:
                x_H = tl.load(x_row_ptr + h + h_H, mask=h + h_H < H, other=0.0)
                is_w_NH = is_w_NH & (h + h_H < H)[None, :]
            weight_NH = tl.load(weight_rows_ptr[:, None] + h + h_H[None, :], mask=is_w_NH, other=0.0)
            product_NH += weight_NH.to(tl.float32) * x_H.to(tl.float32)[None, :]
        out_N = tl.sum(product_NH, axis=1)
        if FORMAT != "plain":
            out_N *= tl.load(scale_rows_ptr, mask=is_id_N, other=0.0).to(tl.float32)
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
    width = min(_COLUMNS[operand.format], max(16, triton.next_power_of_2(H)))
    _gather_dot_kernel[(triton.cdiv(n, _ROWS), T)](
        x_TH, operand.values, operand.scales, ids_Tn, out_Tn, n, len(operand.values), H,
        x_TH.stride(0), operand.values.stride(0), operand.scales.stride(0), ids_Tn.stride(0),
        FORMAT=operand.format, GROUP=operand.group, EVEN_H=H % width == 0, BLOCK_N=_ROWS, BLOCK_H=width, num_warps=4,
    )  # fmt: skip
    return out_Tn
