"""Dot products of one activation with a few rows of a matrix, without tensor cores: the loop of `gather_dot` and of
products too small to fill a device with their tiles.

A program's warps share each of its rows, and their sums meet at the end. Weights in fewer bits become float32 in
registers; their scales meet sums, of a row at the end and of a group of int4 as soon as it is read.
N = rows, H = width, G = groups of int4, P = pairs of columns of int4.
"""

import triton
import triton.language as tl

from rayspec_kernels.common.rows_dot import aligned, scale_and_offset

_ELEMENTS = {"plain": 4096, "int8": 8192, "fp8": 8192, "int4": 16384}  # at a time: 8 KiB of bfloat16 or fewer bits


def columns_at_a_time(weight_format: str, rows: int, width: int) -> int:
    """For a program of so many rows."""
    return min(_ELEMENTS[weight_format] // rows, max(16, triton.next_power_of_2(width)))


@triton.jit
def gemv(x_row_ptr, weight_ptr, scale_ptr, row_N, is_row_N, H, stride_w, stride_s,
         FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
         BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """weight[row] . x as float32 [N]; 0 where the row is none. `row_N` is int64: row * stride passes 2^31. ALIGN
    divides H and the stride."""
    H, stride_w = aligned(H, ALIGN), aligned(stride_w, ALIGN)
    weight_rows_ptr, scale_rows_ptr = weight_ptr + row_N * stride_w, scale_ptr + row_N * stride_s
    h_H = tl.arange(0, BLOCK_H)
    # pipelining is asked for, since the compiler does it only for dots by itself
    if FORMAT == "int4":
        GROUPS: tl.constexpr = BLOCK_H // GROUP
        byte_P, g_G = tl.arange(0, BLOCK_H // 2), tl.arange(0, GROUPS)
        sum_NG = tl.zeros((BLOCK_N, GROUPS), tl.float32)
        for h in tl.range(0, H, BLOCK_H, num_stages=3):
            is_w_NP, is_g_NG = is_row_N[:, None], is_row_N[:, None]
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
            scale_NG, offset_NG = scale_and_offset(pair_NG, 0.0)
            sum_NG += scale_NG * part_NG + offset_NG * x_G[None, :]
        out_N = tl.sum(sum_NG, axis=1)
    else:
        product_NH = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
        for h in tl.range(0, H, BLOCK_H, num_stages=3):
            is_w_NH = is_row_N[:, None]
            if EVEN_H:
                x_H = tl.load(x_row_ptr + h + h_H)
            else:
                x_H = tl.load(x_row_ptr + h + h_H, mask=h + h_H < H, other=0.0)
                is_w_NH = is_w_NH & (h + h_H < H)[None, :]
            weight_NH = tl.load(weight_rows_ptr[:, None] + h + h_H[None, :], mask=is_w_NH, other=0.0)
            product_NH += weight_NH.to(tl.float32) * x_H.to(tl.float32)[None, :]
        out_N = tl.sum(product_NH, axis=1)
        if FORMAT != "plain":
            out_N *= tl.load(scale_rows_ptr, mask=is_row_N, other=0.0).to(tl.float32)
    return out_N
