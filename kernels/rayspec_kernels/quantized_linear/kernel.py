"""y = x W^T for few rows and a matrix in floating point or in fewer bits, dequantised in registers.

A large matrix goes through tensor cores in tall tiles. A small one (the projection in front of a fused head: 4 MiB are
32 tiles of 16 rows, the fewest of a tensor core, for 132 multiprocessors) is cut into tiles as short as that, also
along the batch; for up to 4 rows of x it goes without tensor cores in tiles of 2 to 8 rows, whose columns the warps of
a program share. That fills a device as well as splitting the width over programs does, and leaves no parts to add.
B = rows, N = outputs, H = width, P = parts of the width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.gemv import columns_at_a_time, gemv
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.rows_dot import Operand, aligned, choose_tiling, multiprocessors, rows_dot

_SHORTEST = 16  # tile of a tensor core
_FEW = 4  # rows of x, each of which reads the whole matrix (from L2, where a small one fits)


@triton.jit(do_not_specialize=["B", "N"])
def _linear_kernel(x_ptr, weight_ptr, scale_ptr, y_ptr, B, N, H, part_H, stride_x, stride_w, stride_s,
                   FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
                   BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    """Part p is of the columns p * part_H, ...: results [P, B, N]."""
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    first = tl.multiple_of(part * part_H, BLOCK_H)
    x_ptr += first
    if FORMAT == "int4":
        weight_ptr += tl.multiple_of(first // 2, BLOCK_H // 2)
        scale_ptr += first // GROUP
    else:
        weight_ptr += first
    acc_NB = rows_dot(x_ptr, weight_ptr, scale_ptr, b_B, b_B < B, row_N, row_N < N, tl.minimum(part_H, H - first),
                      stride_x, stride_w, stride_s, FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_N, BLOCK_B, BLOCK_H,
                      STAGES)  # fmt: skip
    y_ptrs = y_ptr + (part.to(tl.int64) * B + b_B)[None, :] * N + row_N[:, None]
    tl.store(y_ptrs, acc_NB.to(y_ptr.dtype.element_ty), mask=(row_N[:, None] < N) & (b_B[None, :] < B))


@triton.jit(do_not_specialize=["size"])
def _add_parts_kernel(parts_ptr, y_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts_ptr + part * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["N"])
def _gemv_kernel(x_ptr, weight_ptr, scale_ptr, y_ptr, N, H, stride_x, stride_w, stride_s,
                 FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_N = gemv(x_ptr + row * aligned(stride_x, ALIGN), weight_ptr, scale_ptr, row_N.to(tl.int64), row_N < N, H,
                 stride_w, stride_s, FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_N, BLOCK_H)  # fmt: skip
    tl.store(y_ptr + row * N + row_N, out_N.to(y_ptr.dtype.element_ty), mask=row_N < N)


def linear_kernel(x_BH: Tensor, weight: Tensor | Quantized) -> Tensor:
    """[B, N] in the dtype of x. Raises ValueError for layouts it does not take."""
    values = weight if isinstance(weight, Tensor) else weight.values
    is_small = triton.cdiv(len(values), _SHORTEST) < multiprocessors(x_BH.device)
    return gemv_kernel(x_BH, weight) if is_small and len(x_BH) <= _FEW else tiled_kernel(x_BH, weight)


def tiled_kernel(x_BH: Tensor, weight: Tensor | Quantized, parts: int = 1) -> Tensor:
    """`linear_kernel` through tensor cores. Of two or more parts of the width (split-K) a second launch takes the sum,
    always in the same order."""
    operand, (B, H) = Operand.of(weight, x_BH), x_BH.shape
    N = len(operand.values)
    tiling = choose_tiling(operand, x_BH, N)
    if tiling.rows == _SHORTEST:
        tiling = choose_tiling(operand, x_BH[:_SHORTEST], N, exactly=_SHORTEST)
    unit = max(tiling.width, operand.group)  # a part begins with a group
    part_H = triton.cdiv(triton.cdiv(H, parts), unit) * unit
    parts = triton.cdiv(H, part_H)
    y_BN = torch.empty(B, N, dtype=x_BH.dtype, device=x_BH.device)
    y_PBN = y_BN if parts == 1 else torch.empty(parts, B, N, dtype=torch.float32, device=x_BH.device)
    _linear_kernel[(triton.cdiv(B, tiling.batch), triton.cdiv(N, tiling.rows), parts)](
        x_BH, operand.values, operand.scales, y_PBN, B, N, H, part_H, x_BH.stride(0), operand.values.stride(0),
        operand.scales.stride(0),
        FORMAT=operand.format, GROUP=operand.group, ALIGN=operand.alignment(x_BH),
        EVEN_H=H % tiling.width == 0,
        BLOCK_N=tiling.rows, BLOCK_B=tiling.batch, BLOCK_H=tiling.width,
        STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    if parts > 1:
        _add_parts_kernel[(triton.cdiv(B * N, 256),)](y_PBN, y_BN, B * N, PARTS=parts, BLOCK=256, num_warps=1)
    return y_BN


def gemv_kernel(x_BH: Tensor, weight: Tensor | Quantized, rows: int | None = None) -> Tensor:
    """`linear_kernel` without tensor cores, in tiles of `rows` rows: 2, 4 or 8, by default so few that there is a
    program for each multiprocessor."""
    operand, (B, H) = Operand.of(weight, x_BH), x_BH.shape
    N = len(operand.values)
    if rows is None:
        rows = 8
        while rows > 2 and triton.cdiv(N, rows) * B < multiprocessors(x_BH.device):
            rows //= 2
    width = columns_at_a_time(operand.format, rows, H)
    y_BN = torch.empty(B, N, dtype=x_BH.dtype, device=x_BH.device)
    _gemv_kernel[(B, triton.cdiv(N, rows))](
        x_BH, operand.values, operand.scales, y_BN, N, H, x_BH.stride(0), operand.values.stride(0),
        operand.scales.stride(0),
        FORMAT=operand.format, GROUP=operand.group, ALIGN=operand.alignment(x_BH),
        EVEN_H=H % width == 0, BLOCK_N=rows, BLOCK_H=width, num_warps=4,
    )  # fmt: skip
    return y_BN
