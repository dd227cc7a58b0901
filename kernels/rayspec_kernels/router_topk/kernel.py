"""DynaSpec's router in four launches without a synchronisation: hidden layer and scores, choice and ranges.

The scores may be computed on a second stream beside the drafter's layer. B = rows, H = width, R = width of the router,
M = routed clusters, t = ranges, G = groups of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.rows_dot import Operand, choose_tiling, rows_dot
from rayspec_kernels.common.topk import key_of
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.router_topk.reference import Router, halves

_TILE = 16  # rows of a small matrix: see quantized_linear/kernel.py
_RANKED = 32  # clusters that one program ranks; it compares them with 128 others at a time


@triton.jit
def _inverse_rms(x_ptr, b_B, is_row_B, H, stride_x, eps,
                 BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    h_H = tl.arange(0, BLOCK_H)
    squares_BH = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        is_x_BH = is_row_B[:, None] & (h + h_H < H)[None, :]
        x_BH = tl.load(x_ptr + b_B.to(tl.int64)[:, None] * stride_x + h + h_H[None, :], mask=is_x_BH, other=0.0)
        squares_BH += x_BH.to(tl.float32) * x_BH.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(squares_BH, axis=1) / H + eps)


@triton.jit
def _hidden_kernel(embed_ptr, feature_ptr, early_ptr, early_scale_ptr, late_ptr, late_scale_ptr, bias_ptr, hidden_ptr,
                   B, R, H, stride_e, stride_f, stride_w, stride_s, eps,
                   FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_H: tl.constexpr,
                   BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    r_R = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    # norms are scalars of a row, so they scale sums instead of inputs
    acc_RB = rows_dot(embed_ptr, early_ptr, early_scale_ptr, b_B, b_B < B, r_R, r_R < R, H,
                      stride_e, stride_w, stride_s, FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_R, BLOCK_B, BLOCK_H,
                      STAGES)  # fmt: skip
    acc_RB *= _inverse_rms(embed_ptr, b_B, b_B < B, H, stride_e, eps, BLOCK_B, BLOCK_H, STAGES)[None, :]
    late_RB = rows_dot(feature_ptr, late_ptr, late_scale_ptr, b_B, b_B < B, r_R, r_R < R, H,
                       stride_f, stride_w, stride_s, FORMAT, GROUP, ALIGN, EVEN_H, BLOCK_R, BLOCK_B, BLOCK_H,
                       STAGES)  # fmt: skip
    acc_RB += late_RB * _inverse_rms(feature_ptr, b_B, b_B < B, H, stride_f, eps, BLOCK_B, BLOCK_H, STAGES)[None, :]
    acc_RB += tl.load(bias_ptr + r_R, mask=r_R < R, other=0.0).to(tl.float32)[:, None]
    acc_RB = tl.where(acc_RB <= 0.0, 0.0, acc_RB)  # NaN stays
    hidden_ptrs = hidden_ptr + b_B.to(tl.int64)[None, :] * R + r_R[:, None]
    tl.store(hidden_ptrs, acc_RB.to(hidden_ptr.dtype.element_ty), mask=(r_R[:, None] < R) & (b_B[None, :] < B))


@triton.jit
def _scores_kernel(hidden_ptr, out_ptr, scale_ptr, bias_ptr, scores_ptr, B, M, R, stride_w, stride_s,
                   FORMAT: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN_R: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr,
                   STAGES: tl.constexpr):  # fmt: skip
    b_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    m_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc_MB = rows_dot(hidden_ptr, out_ptr, scale_ptr, b_B, b_B < B, m_M, m_M < M, R, R, stride_w, stride_s,
                      FORMAT, GROUP, ALIGN, EVEN_R, BLOCK_M, BLOCK_B, BLOCK_R, STAGES)  # fmt: skip
    acc_MB += tl.load(bias_ptr + m_M, mask=m_M < M, other=0.0).to(tl.float32)[:, None]
    scores_ptrs = scores_ptr + b_B.to(tl.int64)[None, :] * M + m_M[:, None]
    tl.store(scores_ptrs, acc_MB, mask=(m_M[:, None] < M) & (b_B[None, :] < B))


@triton.jit
def _key(scores_ptr, m_M, M):
    score_M = tl.load(scores_ptr + m_M, mask=m_M < M, other=float("-inf"))
    return key_of(score_M.to(tl.float32), m_M, m_M < M)


@triton.jit(do_not_specialize=["rows_of_a_group"])
def _choose_kernel(scores_ptr, is_chosen_ptr, M, k, rows_of_a_group,
                   HAS_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_OTHER: tl.constexpr):  # fmt: skip
    """A cluster is among the k best of a row if fewer than k others rank before it: no sorting, no rounds. Marks
    [1 + G, M]: what any row has chosen, then, where there are groups, what a row of each has."""
    row_scores_ptr = scores_ptr + tl.program_id(0).to(tl.int64) * M
    m_M = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    key_M = _key(row_scores_ptr, m_M, M)
    rank_M = tl.zeros((BLOCK_M,), tl.int32)
    for other in range(0, M, BLOCK_OTHER):
        other_O = _key(row_scores_ptr, other + tl.arange(0, BLOCK_OTHER), M)
        rank_M += tl.sum((other_O[None, :] > key_M[:, None]).to(tl.int32), axis=1)
    # rows that choose the same cluster write the same mark
    tl.store(is_chosen_ptr + m_M, tl.full((BLOCK_M,), 1, tl.int32), mask=(m_M < M) & (rank_M < k))
    if HAS_GROUPS:
        group_ptr = is_chosen_ptr + (1 + tl.program_id(0) // rows_of_a_group) * M
        tl.store(group_ptr + m_M, tl.full((BLOCK_M,), 1, tl.int32), mask=(m_M < M) & (rank_M < k))


@triton.jit(do_not_specialize=["groups"])
def _ranges_kernel(is_chosen_ptr, starts_ptr, ranges_ptr, is_of_ptr, M, num_tiles, groups,
                   TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
                   BLOCK_G: tl.constexpr):  # fmt: skip
    """Program c writes the ranges of cluster c and, unless BLOCK_G is 0, which groups chose it; program M + 1 the
    empty ones behind all."""
    cluster = tl.program_id(0)
    c_M = tl.arange(0, BLOCK_M)
    # cluster 0 is pinned, the routed ones follow
    is_chosen_M = tl.load(is_chosen_ptr + c_M - 1, mask=(c_M > 0) & (c_M <= M), other=0)
    is_chosen_M = tl.where(c_M == 0, 1, is_chosen_M)
    start_M = tl.load(starts_ptr + c_M, mask=c_M <= M, other=0).to(tl.int32)
    end_M = tl.load(starts_ptr + c_M + 1, mask=c_M <= M, other=0).to(tl.int32)
    needed_M = is_chosen_M * ((end_M - start_M + TILE - 1) // TILE)
    place = tl.sum(tl.where(c_M < cluster, needed_M, 0), axis=0)
    start = tl.sum(tl.where(c_M == cluster, start_M, 0), axis=0)
    end = tl.sum(tl.where(c_M == cluster, end_M, 0), axis=0)
    needed = tl.sum(tl.where(c_M == cluster, needed_M, 0), axis=0)
    if cluster > M:
        start, end, needed = 0, 0, num_tiles - place
    if BLOCK_G > 0:
        g_G = tl.arange(0, BLOCK_G)
        is_mark_G = (g_G < groups) & (cluster > 0) & (cluster <= M)
        is_of_G = tl.load(is_chosen_ptr + (1 + g_G) * M + cluster - 1, mask=is_mark_G, other=0)
        is_of_G = tl.where(cluster == 0, 1, is_of_G).to(tl.int8)
    for t in range(0, needed, BLOCK_T):
        t_T = t + tl.arange(0, BLOCK_T)
        first_T = tl.minimum(start + t_T * TILE, end)
        is_mine_T = (t_T < needed) & (place + t_T < num_tiles)
        tl.store(ranges_ptr + 2 * (place + t_T), first_T, mask=is_mine_T)
        tl.store(ranges_ptr + 2 * (place + t_T) + 1, tl.minimum(end - first_T, TILE), mask=is_mine_T)
        if BLOCK_G > 0:
            is_of_TG = tl.broadcast_to(is_of_G[None, :], (BLOCK_T, BLOCK_G))
            is_mine_TG = is_mine_T[:, None] & (g_G < groups)[None, :]
            tl.store(is_of_ptr + (place + t_T)[:, None] * groups + g_G[None, :], is_of_TG, mask=is_mine_TG)


def router_scores_kernel(embed_BH: Tensor, feature_BH: Tensor, router: Router, eps: float) -> Tensor:
    """Like the reference; raises ValueError for layouts it does not take."""
    (B, H), R, M = embed_BH.shape, len(router.in_bias_R), len(router.out_bias_M)
    if feature_BH.shape != embed_BH.shape:
        raise ValueError(f"feature must have the shape of embed, {list(embed_BH.shape)}, got {list(feature_BH.shape)}")
    early_RH, late_RH = halves(router.in_R2H)
    early, late = Operand.of(early_RH, embed_BH), Operand.of(late_RH, feature_BH)
    _check_bias("in_bias_R", router.in_bias_R, early, embed_BH.dtype)
    hidden_BR = torch.empty(B, R, dtype=embed_BH.dtype, device=embed_BH.device)
    out = Operand.of(router.out_MR, hidden_BR)
    _check_bias("out_bias_M", router.out_bias_M, out, embed_BH.dtype)
    scores_BM = torch.empty(B, M, dtype=torch.float32, device=embed_BH.device)

    tiling = choose_tiling(early, embed_BH[:_TILE], R, exactly=_TILE)
    _hidden_kernel[(triton.cdiv(B, tiling.batch), triton.cdiv(R, _TILE))](
        embed_BH, feature_BH, early.values, early.scales, late.values, late.scales, router.in_bias_R, hidden_BR,
        B, R, H, embed_BH.stride(0), feature_BH.stride(0), early.values.stride(0), early.scales.stride(0), eps,
        FORMAT=early.format, GROUP=early.group, ALIGN=early.alignment(embed_BH, feature_BH),
        EVEN_H=H % tiling.width == 0,
        BLOCK_R=_TILE, BLOCK_B=tiling.batch, BLOCK_H=tiling.width, STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    tiling = choose_tiling(out, hidden_BR[:_TILE], M, exactly=_TILE)
    _scores_kernel[(triton.cdiv(B, tiling.batch), triton.cdiv(M, _TILE))](
        hidden_BR, out.values, out.scales, router.out_bias_M, scores_BM, B, M, R,
        out.values.stride(0), out.scales.stride(0),
        FORMAT=out.format, GROUP=out.group, ALIGN=out.alignment(hidden_BR), EVEN_R=R % tiling.width == 0,
        BLOCK_M=_TILE, BLOCK_B=tiling.batch, BLOCK_R=tiling.width, STAGES=tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return scores_BM


def union_tiles_kernel(scores_BM: Tensor, k: int, starts: Tensor, tile: int, num_tiles: int, groups: int = 1) -> Tiles:
    """Like the reference; raises ValueError for layouts it does not take."""
    B, M = scores_BM.shape
    if not 1 <= k <= M:
        raise ValueError(f"k must be in 1..{M} (the routed clusters), got {k}")
    if starts.shape != (M + 2,) or not starts.is_contiguous():
        raise ValueError(f"starts must be contiguous with {M + 2} entries, got {tuple(starts.shape)}")
    if not scores_BM.is_contiguous():
        raise ValueError(f"scores must be contiguous, got strides {scores_BM.stride()}")
    if groups < 1 or B % groups:
        raise ValueError(f"groups must divide the {B} rows, got {groups}")
    has_groups = groups > 1
    is_chosen = torch.zeros((1 + groups) * M if has_groups else M, dtype=torch.int32, device=scores_BM.device)
    _choose_kernel[(B, triton.cdiv(M, _RANKED))](scores_BM, is_chosen, M, k, B // groups, HAS_GROUPS=has_groups,
                                                 BLOCK_M=_RANKED, BLOCK_OTHER=128)  # fmt: skip
    ranges_t2 = torch.empty(num_tiles, 2, dtype=torch.int32, device=scores_BM.device)
    is_of_tG = ranges_t2.new_empty(num_tiles, groups, dtype=torch.int8) if has_groups else None
    _ranges_kernel[(M + 2,)](is_chosen, starts, ranges_t2, ranges_t2 if is_of_tG is None else is_of_tG,
                             M, num_tiles, groups, TILE=tile, BLOCK_M=triton.next_power_of_2(M + 1), BLOCK_T=64,
                             BLOCK_G=triton.next_power_of_2(groups) if has_groups else 0)  # fmt: skip
    return Tiles(ranges_t2, tile, is_of_tG)


def router_topk_kernel(
    embed_BH: Tensor,
    feature_BH: Tensor,
    router: Router,
    k: int,
    starts: Tensor,
    tile: int,
    num_tiles: int,
    eps: float,
    groups: int = 1,
) -> tuple[Tensor, Tiles]:
    scores_BM = router_scores_kernel(embed_BH, feature_BH, router, eps)
    return scores_BM, union_tiles_kernel(scores_BM, k, starts, tile, num_tiles, groups)


def _check_bias(name: str, bias: Tensor, operand: Operand, dtype: torch.dtype) -> None:
    if bias.shape != operand.values.shape[:1] or not bias.is_contiguous() or bias.dtype != dtype:
        raise ValueError(
            f"{name} must be {len(operand.values)} contiguous numbers of {dtype}, one for each row of its matrix, got "
            f"{bias.dtype} {list(bias.shape)}"
        )
