"""The k best of logits that a product has written, and their normaliser: the other way to a head's answer.

A library's product and this write and read B V logits of 4 bytes, unlike the fused heads (score_tiles.py), and leave
the product to who does it best. Timed beside them by the suite; nothing chooses it yet.
B = rows, V = logits of a row, t = tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.best import MAX_K, Best
from rayspec_kernels.common.topk import best_buffers, merge_best, store_tile

TILE = 1024


@triton.jit(do_not_specialize=["V", "num_tiles"])
def _logits_kernel(logits_ptr, keys_ptr, norms_ptr, V, num_tiles, stride,
                   K: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    b_B = tl.program_id(0) + tl.arange(0, 1)  # one row a program, and so always one of the batch
    n_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_valid_N = n_N < V
    place_NB = b_B[None, :].to(tl.int64) * stride + n_N[:, None]
    score_NB = tl.load(logits_ptr + place_NB, mask=is_valid_N[:, None], other=float("-inf")).to(tl.float32)
    store_tile(score_NB, is_valid_N[:, None], tile * BLOCK_N, b_B, b_B >= 0, tile, num_tiles, keys_ptr, norms_ptr,
               K, BLOCK_N)  # fmt: skip


def logits_topk(logits_BV: Tensor, k: int) -> Best:
    """Ties: the lowest id; NaN counts as the largest. Raises ValueError for k outside of 1..16 and for columns that
    are not contiguous."""
    if logits_BV.dim() != 2 or logits_BV.stride(1) != 1:
        raise ValueError(
            "logits must have two dimensions, rows and contiguous columns, got shape "
            f"{tuple(logits_BV.shape)} with strides {logits_BV.stride()}; call .contiguous() on them"
        )
    B, V = logits_BV.shape
    if not 1 <= k <= min(MAX_K, V):
        raise ValueError(f"k must be in 1..{min(MAX_K, V)} ({V} logits, {MAX_K} at most), got {k}")
    num_tiles = triton.cdiv(V, TILE)
    keys_BKn, norms_B2n = best_buffers(B, k, num_tiles, logits_BV.device)
    _logits_kernel[(B, num_tiles)](
        logits_BV, keys_BKn, norms_B2n, V, num_tiles, logits_BV.stride(0), K=k, BLOCK_N=TILE, num_warps=4
    )
    return merge_best(keys_BKn, norms_B2n, None)


def product(x_BH: Tensor, weight_VH: Tensor) -> Tensor:
    """x W^T [B, V] in float32, by cuBLAS from the values as they are stored."""
    if x_BH.is_cuda:
        return torch.mm(x_BH, weight_VH.T, out_dtype=torch.float32)
    return x_BH.float() @ weight_VH.float().T
