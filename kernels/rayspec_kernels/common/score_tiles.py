"""Scores of chosen rows of a matrix with their k best and normaliser: what all fused heads are.

Each program has one tile. Programs that go over several tiles in turn and keep their k best in registers were built and
timed: on an H200 at B = 1 and k = 8 they were slower by more than 1% in 8 of 15 cases, faster by as much in 2, and so
they are gone (docs/results/loop-instructions.md).
B = activations, N = rows of the matrix, H = width, L = listed candidates, t = tiles, k = kept candidates, G = groups of
activations.
"""

import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.best import MAX_K, Best
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.rows_dot import Operand, choose_tiling, rows_dot
from rayspec_kernels.common.topk import best_buffers, merge_best, store_empty_tile, store_tile


@triton.jit(do_not_specialize=["B", "N", "L", "num_tiles", "groups"])
def _tile_each_kernel(x_ptr, weight_ptr, scale_ptr, id_ptr, tiles_ptr, is_of_ptr, keys_ptr, norms_ptr,
                      B, N, L, H, num_tiles, groups, stride_x, stride_w, stride_s,
                      K: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
                      EVEN_H: tl.constexpr, IS_GATHERED: tl.constexpr, HAS_TILES: tl.constexpr,
                      HAS_GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
                      STAGES: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)  # the batch runs fastest, so that its programs share a tile of the matrix in L2
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    is_row_B = b_B < B
    first, count = tile * BLOCK_N, tl.minimum(BLOCK_N, L - tile * BLOCK_N)
    if HAS_TILES:
        first, count = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if HAS_GROUPS:
        is_of_B = tl.load(is_of_ptr + tile * groups + b_B // (B // groups), mask=is_row_B, other=0) != 0
        # what none of these rows asks for need not be read
        count = tl.where(tl.max(is_of_B.to(tl.int32), axis=0) > 0, count, 0)
    if count == 0:
        store_empty_tile(b_B, is_row_B, tile, num_tiles, keys_ptr, norms_ptr, K, BLOCK_B)
        return
    row_N = first + tl.arange(0, BLOCK_N)
    is_valid_N = tl.arange(0, BLOCK_N) < count
    if IS_GATHERED:
        row_N = tl.load(id_ptr + row_N, mask=is_valid_N, other=-1).to(tl.int32)
        is_valid_N = (row_N >= 0) & (row_N < N)  # the list may end in padding
    score_NB = rows_dot(x_ptr, weight_ptr, scale_ptr, b_B, is_row_B, row_N, is_valid_N, H, stride_x, stride_w, stride_s,
                        FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_N, BLOCK_B, BLOCK_H, STAGES)  # fmt: skip
    is_valid_NB = is_valid_N[:, None]
    if HAS_GROUPS:
        is_valid_NB = is_valid_NB & is_of_B[None, :]
    store_tile(score_NB, is_valid_NB, first, b_B, is_row_B, tile, num_tiles, keys_ptr, norms_ptr, K, BLOCK_N)


def score_tiles(
    x_BH: Tensor,
    weight: Tensor | Quantized,
    k: int,
    *,
    ids_L: Tensor | None = None,
    is_gathered: bool = False,
    tiles_t2: Tensor | None = None,
    tile: int | None = None,
    is_of_tG: Tensor | None = None,
) -> Best:
    """The k best candidates of each row of x and the log-sum-exp over all of them.

    Candidate i has the id i, or `ids_L[i]`; its row of the matrix is i, or its id where `is_gathered` (an id that is no
    row of the matrix is no candidate). `tiles_t2`, int32, names ranges (first candidate, count) of at most `tile`
    candidates instead of all; count 0 is an empty range, which reads nothing of the matrix. `is_of_tG`, int8, says for
    which groups of rows the candidates of a range count; a group is equally many rows side by side. None: for all.
    Ties: the first candidate. Static shapes, nothing synchronises.
    """
    operand, (B, H) = Operand.of(weight, x_BH), x_BH.shape
    listed = len(operand.values) if ids_L is None else len(ids_L)
    if not 1 <= k <= min(MAX_K, listed):
        raise ValueError(f"k must be in 1..{min(MAX_K, listed)} ({listed} candidates, {MAX_K} at most), got {k}")
    for name, table in (("ids", ids_L), ("tiles", tiles_t2), ("the groups of tiles", is_of_tG)):
        if table is not None and not table.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {table.stride()}")
    if ids_L is not None and not is_gathered and listed != len(operand.values):
        raise ValueError(f"ids must name each of the {len(operand.values)} rows, got {listed}")

    if tile is not None and tile not in (16, 32, 64, 128, 256):
        raise ValueError(f"the size of a tile must be 16, 32, 64, 128 or 256, got {tile}")

    tiling = choose_tiling(operand, x_BH, listed, exactly=tile)
    num_tiles = triton.cdiv(listed, tiling.rows) if tiles_t2 is None else len(tiles_t2)
    groups = 1 if is_of_tG is None else is_of_tG.shape[1]
    if is_of_tG is not None and (len(is_of_tG) != num_tiles or groups == 0 or B % groups):
        raise ValueError(
            f"each of the {num_tiles} tiles must say which groups of as many of the {B} rows it is of, "
            f"got {list(is_of_tG.shape)}"
        )
    keys_BKn, norms_B2n = best_buffers(B, k, num_tiles, x_BH.device)
    _tile_each_kernel[(triton.cdiv(B, tiling.batch), num_tiles)](
        x_BH, operand.values, operand.scales, operand.values if ids_L is None else ids_L,
        operand.values if tiles_t2 is None else tiles_t2, operand.values if is_of_tG is None else is_of_tG,
        keys_BKn, norms_B2n, B, len(operand.values), listed, H, num_tiles, groups,
        x_BH.stride(0), operand.values.stride(0), operand.scales.stride(0),
        K=k, FORMAT=operand.format, GROUP=operand.group, ALIGN=operand.alignment(x_BH),
        EVEN_H=H % tiling.width == 0, IS_GATHERED=is_gathered, HAS_TILES=tiles_t2 is not None,
        HAS_GROUPS=is_of_tG is not None, BLOCK_N=tiling.rows, BLOCK_B=tiling.batch, BLOCK_H=tiling.width,
        STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return merge_best(keys_BKn, norms_B2n, ids_L)
