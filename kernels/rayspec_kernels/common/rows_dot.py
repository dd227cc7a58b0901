"""Dot products of a few activations with rows of a large matrix: the loop that every head kernel shares.

Weights in floating point are the left operand of the tensor cores (wgmma: 64 rows of them at a time, from shared
memory), so that a batch of one wastes 15 of 16 columns of a small operand and never rows of the large one. Weights in
fewer bits become the dtype of x in registers (exactly: int8, e4m3, 0..15 and 128..143 are bf16 numbers, the first three
fp16 ones) and are the right operand of up to 32 rows of x, which is mma.sync: a wgmma is asynchronous, and assemblers
before CUDA 13.3 overwrite registers that it still reads (triton-lang/triton 9433, 11781). Scales are applied to sums,
never to single weights.
B = activations, N = rows of the tile, H = width, g = columns that share a scale.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.quantized import GROUP_SIZES, Quantized

# it keeps bfloat16 as integers, converts integers to it wrongly and multiplies its bits
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

FORMAT_OF = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}
# with two values a byte: column 2 i in the low half, (scale, zero) side by side as two bfloat16


@triton.jit
def dot(left, right, acc):
    """acc + left right in float32 sums; float32 operands are not rounded to tf32."""
    if _IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def as_numbers(weight_NH, x_BH):
    """The weights in the dtype of x, transposed."""
    if _IS_INTERPRETED:
        return tl.trans(weight_NH).to(tl.float32)
    return tl.trans(weight_NH).to(x_BH.dtype)


@triton.jit
def numbers_of_nibbles(eight_NW, x_BH):
    """(0..15 and as much more as the second value says, in the dtype of x [N, 8 W]; that value).

    Conversions of integers are slow. In bfloat16 n with the bits of 128 is 128 + n, exactly, and two numbers take two
    instructions: nibbles i and i + 4 of a word lie 16 bits apart, as two bfloat16 do.
    """
    N: tl.constexpr = eight_NW.shape[0]
    W: tl.constexpr = eight_NW.shape[1]
    IS_BFLOAT16: tl.constexpr = x_BH.dtype == tl.bfloat16
    BITS: tl.constexpr = 0x43004300 if IS_BFLOAT16 else 0
    pair0, pair1 = (eight_NW & 0x000F000F) | BITS, ((eight_NW >> 4) & 0x000F000F) | BITS
    pair2, pair3 = ((eight_NW >> 8) & 0x000F000F) | BITS, ((eight_NW >> 12) & 0x000F000F) | BITS
    pair_NP = tl.reshape(tl.join(tl.join(pair0, pair2), tl.join(pair1, pair3)), (N, 4 * W))
    low, high = pair_NP.to(tl.int16), (pair_NP >> 16).to(tl.int16)
    if IS_BFLOAT16:
        low, high = low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
    return tl.interleave(low, high).to(x_BH.dtype), 128.0 if IS_BFLOAT16 else 0.0


@triton.jit
def in_order_of_nibbles(x_BH):
    """Columns 0 4 1 5 2 6 3 7 of each eight, since products do not ask for an order."""
    B: tl.constexpr = x_BH.shape[0]
    H: tl.constexpr = x_BH.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x_BH, (B, H // 8, 2, 4)), (0, 1, 3, 2)), (B, H))


@triton.jit
def scale_and_offset(pair, above):
    """Scale and offset of a group of int4: its values are scale * (above + 0..15) + offset. bfloat16 is the upper half
    of a float32, and of the two in a pair (little-endian) the scale is the low one, the zero the high one."""
    scale = (pair << 16).to(tl.float32, bitcast=True)
    zero = ((pair >> 16) << 16).to(tl.float32, bitcast=True)
    return scale, zero - (8 + above) * scale


@triton.jit
def aligned(number, ALIGN: tl.constexpr):
    """The number, of which the compiler then knows that ALIGN divides it; by itself it asks of 16 alone. Only what
    lies at multiples of 4 bytes is copied ahead; other loads wait in registers and spill them."""
    return number if ALIGN == 16 else number // ALIGN * ALIGN


@triton.jit
def rows_dot(x_ptr, weight_ptr, scale_ptr, b_B, is_row_B, row_N, is_valid_N, H, stride_x, stride_w, stride_s,
             FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """weight[row] . x[b] as float32 [N, B]; 0 where the row is not valid. Rows of both are contiguous. ALIGN divides H
    and the strides of both."""
    H, stride_x, stride_w = aligned(H, ALIGN), aligned(stride_x, ALIGN), aligned(stride_w, ALIGN)
    x_rows_ptr = x_ptr + b_B.to(tl.int64)[:, None] * stride_x
    weight_rows_ptr = weight_ptr + row_N.to(tl.int64)[:, None] * stride_w  # row * stride passes 2^31
    h_H = tl.arange(0, BLOCK_H)
    # stages are asked for, since by itself the compiler asks ahead for what dots read alone, not for scales of int4
    if FORMAT == "int4":
        acc_BN = tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
        word_rows_ptr = weight_rows_ptr.to(tl.pointer_type(tl.int32))  # eight columns each; groups divide by 32
        word_W = tl.arange(0, BLOCK_H // 8)
        scale_rows_ptr = scale_ptr + row_N.to(tl.int64) * stride_s
        for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):  # one group a turn, or a part of it
            x_BH = tl.load(x_rows_ptr + h + h_H[None, :], mask=is_row_B[:, None], other=0.0)
            eight_NW = tl.load(word_rows_ptr + h // 8 + word_W[None, :], mask=is_valid_N[:, None], other=0)
            pair_N = tl.load(scale_rows_ptr + h // GROUP, mask=is_valid_N, other=0)
            weight_NH, above = numbers_of_nibbles(eight_NW, x_BH)
            sum_B = tl.sum(x_BH.to(tl.float32), axis=1)  # here, where fewer registers are taken
            part_BN = dot(in_order_of_nibbles(x_BH), tl.trans(weight_NH), tl.zeros((BLOCK_B, BLOCK_N), tl.float32))
            scale_N, offset_N = scale_and_offset(pair_N, above)
            acc_BN += scale_N[None, :] * part_BN + offset_N[None, :] * sum_B[:, None]
        return tl.trans(acc_BN)
    acc_NB, acc_BN = tl.zeros((BLOCK_N, BLOCK_B), tl.float32), tl.zeros((BLOCK_B, BLOCK_N), tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        is_x_BH, is_w_NH = is_row_B[:, None], is_valid_N[:, None]
        if not EVEN_H:
            is_x_BH, is_w_NH = is_x_BH & (h + h_H < H)[None, :], is_w_NH & (h + h_H < H)[None, :]
        x_BH = tl.load(x_rows_ptr + h + h_H[None, :], mask=is_x_BH, other=0.0)
        weight_NH = tl.load(weight_rows_ptr + h + h_H[None, :], mask=is_w_NH, other=0.0)
        if FORMAT == "plain":
            acc_NB = dot(weight_NH, tl.trans(x_BH), acc_NB)
        else:
            acc_BN = dot(x_BH, as_numbers(weight_NH, x_BH), acc_BN)
    if FORMAT != "plain":
        scale_N = tl.load(scale_ptr + row_N.to(tl.int64) * stride_s, mask=is_valid_N, other=0.0)
        acc_NB = tl.trans(acc_BN * scale_N.to(tl.float32)[None, :])
    return acc_NB


class Operand(NamedTuple):
    """A matrix [N, H] as the kernels take it."""

    values: Tensor
    scales: Tensor  # [N], [N, H / g] pairs of int4; `values` itself where there are none; rows may lie apart
    format: str  # plain, int8, fp8, int4
    group: int
    width: int

    def alignment(self, *inputs: Tensor) -> int:
        """The largest power of two up to 16 that divides the width and the strides of the matrix and its inputs."""
        return math.gcd(16, self.width, self.values.stride(0), *(x.stride(0) for x in inputs))

    @classmethod
    def of(cls, weight: Tensor | Quantized, x_BH: Tensor) -> "Operand":
        """Raises ValueError for shapes, types and layouts that no kernel here takes."""
        values = weight if isinstance(weight, Tensor) else weight.values
        for name, tensor in (("x", x_BH), ("weight", values)):
            if tensor.dim() != 2 or tensor.stride(1) != 1 or tensor.shape[0] < 1:
                raise ValueError(
                    f"{name} must have two dimensions, rows and contiguous columns, got shape {tuple(tensor.shape)} "
                    f"with strides {tensor.stride()}; call .contiguous() on it once, not at every step"
                )
        if x_BH.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"x must be bfloat16, float16 or float32, got {x_BH.dtype}")
        if isinstance(weight, Tensor):
            if values.dtype != x_BH.dtype:
                raise ValueError(f"weight must have the dtype of x, {x_BH.dtype}, or be Quantized; got {values.dtype}")
            operand = cls(values, values, "plain", 0, values.shape[1])
        elif FORMAT_OF.get(values.dtype) == "int4":
            operand = _int4_operand(weight)
        elif values.dtype in FORMAT_OF:
            if weight.scales.shape != values.shape[:1]:
                raise ValueError(f"scales must be one a row, [{len(values)}], got {list(weight.scales.shape)}")
            operand = cls(values, weight.scales, FORMAT_OF[values.dtype], 0, values.shape[1])
        else:
            raise ValueError(f"quantised values must be of {', '.join(map(str, FORMAT_OF))}, got {values.dtype}")
        if operand.width != x_BH.shape[1]:
            raise ValueError(f"x and weight must be equally wide, got {x_BH.shape[1]} and {operand.width}")
        return operand


def _int4_operand(weight: Quantized) -> Operand:
    (values, scales), width = weight, 2 * weight.values.shape[1]
    groups = scales.shape[1] if scales.dim() == 3 else 0
    if (
        scales.shape != (len(values), groups, 2)
        or width not in (groups * size for size in GROUP_SIZES)
        or scales.dtype != torch.bfloat16
        or scales.stride()[1:] != (2, 1)
    ):
        raise ValueError(
            f"scales of int4 must be bfloat16 [{len(values)}, groups, 2] with contiguous groups of one of "
            f"{GROUP_SIZES} columns, got {scales.dtype} {list(scales.shape)} with strides {scales.stride()}"
        )
    if values.storage_offset() % 4 or values.stride(0) % 4:
        raise ValueError(
            "rows of int4 are read in words of four bytes, but they begin at byte "
            f"{values.storage_offset()} and lie {values.stride(0)} apart; call .contiguous() on them once"
        )
    return Operand(values, scales.view(torch.int32).squeeze(2), "int4", width // groups, width)


class Tiling(NamedTuple):
    """Sizes of one program's work, and how the compiler is to run it."""

    rows: int
    batch: int
    width: int
    warps: int
    stages: int


_TALLEST = 128
_STAGE_BYTES = 36 * 1024
_SYNCHRONOUS = 32  # rows of x up to which a product with x on the left is mma.sync: weights in fewer bits need that
_SHARED_BYTES = 110 * 1024  # two programs fit into the 228 KiB of a Hopper multiprocessor
# of numbers made in a turn, in a row: twice as many spill, or ask for more shared memory than small GPUs have
_WIDEST_BYTES = 128


def choose_tiling(operand: Operand, x_BH: Tensor, rows: int, exactly: int | None = None) -> Tiling:
    """For `rows` rows of the matrix, in tiles of `_TALLEST` or fewer, or of `exactly` so many.

    Tall tiles reread x less often; short ones keep every multiprocessor busy. Bytes in flight decide the bandwidth:
    4.3 TB/s and some 800 ns of latency need about 26 KiB a multiprocessor, and twice that is on the safe side. These
    sizes follow from that arithmetic and from the compiler's report alone (registers, no spills; 99 KiB of shared
    memory where a program gets no more): an H200 has timed the kernels with them, and with no others, in bfloat16 and
    with groups of 64.
    """
    is_plain, is_float32 = operand.format == "plain", x_BH.dtype == torch.float32
    # in float32 there are no tensor cores, and operands live in registers, too
    most = (64 if is_plain else _SYNCHRONOUS) // (2 if is_float32 else 1)
    batch = min(most, max(16, triton.next_power_of_2(x_BH.shape[0])))
    tile = exactly or _TALLEST
    while exactly is None and tile > 16 and triton.cdiv(rows, tile) < 3 * multiprocessors(x_BH.device) // 2:
        tile //= 2
    column_bytes = tile * operand.values.element_size() + batch * x_BH.element_size()
    if operand.format == "int4":
        column_bytes -= tile // 2
        width = operand.group
    else:
        width = min(256, max(16, triton.next_power_of_2(operand.width)))
        while width > 16 and width * column_bytes > _STAGE_BYTES:
            width //= 2
    shared_bytes = _SHARED_BYTES
    if operand.format == "int4" or (is_float32 and not is_plain):  # numbers made of bits pass through shared memory
        width = min(width, _WIDEST_BYTES // x_BH.element_size())
        shared_bytes -= tile * width * x_BH.element_size()
    # sums and keys of a tile live in registers, and int4 needs a second set of sums
    warps = 8 if tile > _TALLEST or tile * batch > (64 * 64 if operand.format == "int4" else 128 * 64) else 4
    return Tiling(tile, batch, width, warps, min(8, max(2, shared_bytes // (width * column_bytes))))


@cache
def multiprocessors(device: torch.device) -> int:
    """1 where there is none, so that the interpreter's few programs are whole tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
