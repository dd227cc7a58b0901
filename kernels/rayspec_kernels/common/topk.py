"""The k best of many scores that never reach memory: each program keeps the k best of its tile, a merge picks.

A candidate travels as one int64 key: its score as an integer that sorts like the float (NaN above everything), then
2^31 - 1 - id. Keys are distinct, a larger one is better, and equal scores resolve to the lowest id.
B = rows, n = programs, k = kept candidates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.best import Best

_LOWEST = tl.constexpr(-(2**31))  # sorts below every score, -inf included
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def sortable(score):
    """int32 that sorts as the float32 score; -0 equals 0, any NaN comes out on top."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def key_of(score, place, is_one):
    key = (sortable(score).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    return tl.where(is_one, key, _NO_KEY)


@triton.jit
def score_of(key):
    sorting = (key >> 32).to(tl.int32)
    score = (sorting ^ ((sorting >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(key == _NO_KEY, float("-inf"), score)


@triton.jit
def place_of(key):
    return tl.where(key == _NO_KEY, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF))


@triton.jit
def finite_or_zero(x):
    """What may be subtracted before exp: inf - inf is no number."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit
def _key_in_tile(sorting, place):
    key = (sorting.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    return tl.where(sorting == _LOWEST, _NO_KEY, key)


@triton.jit
def store_tile(score_NB, is_valid_NB, first, b_B, is_row_B, program, programs, keys_ptr, norms_ptr,
               K: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Write the K best of each row of a program's tile into keys [B, K, n], the tile's (maximum, sum of exponentials)
    into norms [B, 2, n]. The tile's candidates are at the places first, first + 1, ... of the list of all; which of
    them count is said for each row, or as [N, 1] for all rows."""
    row_B = b_B.to(tl.int64)
    score_NB = tl.where(is_valid_NB, score_NB, float("-inf"))
    top_B = tl.max(score_NB, axis=0)
    total_B = tl.sum(tl.exp(score_NB - finite_or_zero(top_B)[None, :]), axis=0)
    tl.store(norms_ptr + row_B * 2 * programs + program, top_B, mask=is_row_B)
    tl.store(norms_ptr + (row_B * 2 + 1) * programs + program, total_B, mask=is_row_B)

    n_N = tl.arange(0, BLOCK_N)
    sorting_NB = tl.where(is_valid_NB, sortable(score_NB), _LOWEST)
    for j in range(K):
        best_B, at_B = tl.max(sorting_NB, axis=0, return_indices=True)
        key_B = _key_in_tile(best_B, first + at_B)
        tl.store(keys_ptr + (row_B * K + j) * programs + program, key_B, mask=is_row_B)
        sorting_NB = tl.where(n_N[:, None] == at_B[None, :], _LOWEST, sorting_NB)


@triton.jit
def store_empty_tile(b_B, is_row_B, program, programs, keys_ptr, norms_ptr, K: tl.constexpr, BLOCK_B: tl.constexpr):
    row_B = b_B.to(tl.int64)
    tl.store(norms_ptr + row_B * 2 * programs + program, tl.full((BLOCK_B,), float("-inf"), tl.float32), mask=is_row_B)
    tl.store(norms_ptr + (row_B * 2 + 1) * programs + program, tl.zeros((BLOCK_B,), tl.float32), mask=is_row_B)
    for j in range(K):
        key_B = tl.full((BLOCK_B,), _NO_KEY, tl.int64)
        tl.store(keys_ptr + (row_B * K + j) * programs + program, key_B, mask=is_row_B)


@triton.jit(do_not_specialize=["programs"])
def _merge_kernel(keys_ptr, norms_ptr, names_ptr, scores_ptr, ids_ptr, log_norm_ptr, programs,
                  HAS_NAMES: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    program_P = tl.arange(0, BLOCK_P)
    is_program_P = program_P < programs

    top_P = tl.load(norms_ptr + row * 2 * programs + program_P, mask=is_program_P, other=float("-inf"))
    total_P = tl.load(norms_ptr + (row * 2 + 1) * programs + program_P, mask=is_program_P, other=0.0)
    top = finite_or_zero(tl.max(top_P, axis=0))
    tl.store(log_norm_ptr + row, tl.log(tl.sum(total_P * tl.exp(top_P - top), axis=0)) + top)

    # the k best lie with the k programs whose best is best
    j_K = tl.arange(0, BLOCK_K)
    chosen_K = tl.zeros((BLOCK_K,), tl.int32)
    key_P = tl.load(keys_ptr + row * K * programs + program_P, mask=is_program_P, other=_NO_KEY)
    for j in range(K):
        _, at = tl.max(key_P, axis=0, return_indices=True)
        chosen_K = tl.where(j_K == j, at, chosen_K)
        key_P = tl.where(program_P == at, _NO_KEY, key_P)

    # with fewer than k programs one of them comes twice; equal keys leave together below
    places_KK = (row * K + j_K[:, None]) * programs + chosen_K[None, :]
    key_KK = tl.load(keys_ptr + places_KK, mask=(j_K[:, None] < K) & (j_K[None, :] < K), other=_NO_KEY)
    key_KK = tl.reshape(key_KK, (BLOCK_K * BLOCK_K,))
    for j in range(K):
        key = tl.max(key_KK, axis=0)
        tl.store(scores_ptr + row * K + j, score_of(key))
        place = place_of(key)
        if HAS_NAMES:
            place = tl.load(names_ptr + place, mask=place >= 0, other=-1).to(tl.int64)
        tl.store(ids_ptr + row * K + j, place)
        key_KK = tl.where(key_KK == key, _NO_KEY, key_KK)


def best_buffers(rows: int, k: int, programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(keys int64 [B, k, n], norms float32 [B, 2, n]): programs last, since the merge reads along them."""
    keys_BKn = torch.empty(rows, k, programs, dtype=torch.int64, device=device)
    return keys_BKn, torch.empty(rows, 2, programs, dtype=torch.float32, device=device)


def merge_best(keys_BKn: Tensor, norms_B2n: Tensor, names_L: Tensor | None) -> Best:
    """`names_L`: the id of each candidate, None where that is its place."""
    B, k, programs = keys_BKn.shape
    scores_Bk = torch.empty(B, k, dtype=torch.float32, device=keys_BKn.device)
    best = Best(scores_Bk, torch.empty_like(scores_Bk, dtype=torch.int64), torch.empty_like(scores_Bk[:, 0]))
    block = triton.next_power_of_2(programs)
    # one program a row; 4 to 8 lists a thread keep the k dependent reductions short
    warps = min(16, max(1, block // 256))
    _merge_kernel[(B,)](
        keys_BKn, norms_B2n, keys_BKn if names_L is None else names_L, *best, programs,
        HAS_NAMES=names_L is not None, K=k, BLOCK_K=triton.next_power_of_2(k), BLOCK_P=block, num_warps=warps,
    )  # fmt: skip
    return best
