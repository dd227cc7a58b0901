"""SLiM's choice from EAGLE-2's tree in one launch without a synchronisation: one program scores the candidates of a
request, takes the K best of them, and writes their tree.

Letters are the reference's; a candidate's depth follows from its number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.common.layout import check_layouts, check_sizes
from rayspec_kernels.common.tree_links import write_bare_row, write_links
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.kernel import log_correlation
from rayspec_kernels.slim_posterior.reference import SlimPosterior
from rayspec_kernels.tree_prune.reference import MAX_SIZES, Expansion, Sizes


@triton.jit
def _depth_of(node, W):
    return tl.where(node == 0, 0, tl.where(node <= W, 1, 2 + (node - 1 - W) // (W * W)))


@triton.jit(do_not_specialize=["P", "search_steps"])
def _prune_kernel(root_ptr, parents_ptr, p_ptr, ids_ptr, key_ptr, log_r_ptr, first_ptr, second_ptr, sums_ptr, up_ptr,
                  place_ptr, parent_ptr, tokens_ptr, mask_ptr, depth_ptr, first_child_ptr, next_sibling_ptr,
                  num_nodes_ptr, entries, C, W, D, K, N, V, P, search_steps, BONUS: tl.constexpr,
                  BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + request)
    ids_ptr += request * C
    sums_ptr += request * (C + 1)
    up_ptr += request * (C + 1)
    place_ptr += request * (C + 1)
    parent_ptr += request * N
    tokens_ptr += request * N
    mask_ptr += request * N * N
    depth_ptr += request * N
    first_child_ptr += request * N
    next_sibling_ptr += request * N

    n_N = tl.arange(0, BLOCK_N)
    tl.store(first_child_ptr + n_N, tl.full((BLOCK_N,), -1, tl.int64), mask=n_N < N)
    for node in range(N):
        write_bare_row(mask_ptr, node, N, BLOCK_N)

    # the score of every node: what the pairs on its path add, then its own probability, which is that of its path
    m_M = tl.arange(0, BLOCK_M)
    is_candidate_M, is_any_M = (m_M > 0) & (m_M <= C), m_M <= C
    entry_M = (m_M - 1) // W
    has_entry_M = is_candidate_M & (entry_M < entries)
    up_M = tl.load(parents_ptr + request * entries + entry_M, mask=has_entry_M, other=-1).to(tl.int32) + 1
    token_M = tl.load(ids_ptr + m_M - 1, mask=is_candidate_M, other=0)
    before_M = tl.load(ids_ptr + up_M - 1, mask=is_candidate_M & (up_M > 0), other=0)
    before_M = tl.where(up_M > 0, before_M, root)
    log_r_M = log_correlation(before_M, token_M, key_ptr, log_r_ptr, first_ptr, second_ptr, V, P, search_steps)
    factor_M = tl.where(is_candidate_M, log_r_M.to(tl.float64) + BONUS, 0.0)
    tl.store(up_ptr + m_M, up_M, mask=is_any_M)
    tl.store(place_ptr + m_M, tl.zeros((BLOCK_M,), tl.int32), mask=is_any_M)
    sum_M = factor_M
    for _ in range(D - 1):
        tl.store(sums_ptr + m_M, sum_M, mask=is_any_M)
        tl.debug_barrier()  # the sums of parents are read by other threads than wrote them
        sum_M = factor_M + tl.load(sums_ptr + up_M, mask=is_any_M, other=0.0)
        tl.debug_barrier()
    p_M = tl.load(p_ptr + request * C + m_M - 1, mask=is_candidate_M, other=1.0)
    score_M = sum_M + tl.log(p_M.to(tl.float64))
    score_M = tl.where(is_candidate_M & (score_M < float("inf")), score_M, float("-inf"))

    h_K = tl.arange(0, BLOCK_K)
    best_K = tl.zeros((BLOCK_K,), tl.int32)  # the root where nothing is possible any more
    for h in range(K):
        best = tl.max(score_M, axis=0)
        at = tl.min(tl.where((score_M == best) & (score_M > float("-inf")), m_M, BLOCK_M), axis=0)
        best_K = tl.where((h_K == h) & (at < BLOCK_M), at, best_K)
        score_M = tl.where(m_M == at, float("-inf"), score_M)
    tl.debug_barrier()  # the parents

    # a node is added by the best one that is it or lies below it; those that fit are the first ones
    is_later_KK = h_K[:, None] < h_K[None, :]
    added_K = tl.zeros((BLOCK_K,), tl.int32)
    node_K = best_K
    for i in range(D):
        is_here_K = (node_K > 0) & (_depth_of(node_K, W) == D - i)
        here_K = tl.where(is_here_K, node_K, -1)
        is_known_KK = is_later_KK & (here_K[:, None] == here_K[None, :])
        added_K += (is_here_K & (tl.sum(is_known_KK.to(tl.int32), axis=0) == 0)).to(tl.int32)
        node_K = tl.where(is_here_K, tl.load(up_ptr + node_K), node_K)
    upto_K = tl.cumsum(added_K, axis=0)
    is_taken_K = upto_K < N
    num_nodes = 1 + tl.max(tl.where(is_taken_K, upto_K, 0), axis=0)
    tl.store(num_nodes_ptr + request, num_nodes.to(tl.int64))

    # the kept ones, in their order
    node_K = best_K
    for _ in range(D):
        tl.store(place_ptr + node_K, tl.full((BLOCK_K,), 1, tl.int32), mask=is_taken_K & (node_K > 0))
        node_K = tl.load(up_ptr + node_K)
    tl.debug_barrier()
    is_kept_M = tl.load(place_ptr + m_M, mask=is_candidate_M, other=0)
    place_M = tl.cumsum(is_kept_M, axis=0)
    tl.debug_barrier()
    tl.store(place_ptr + m_M, place_M, mask=is_any_M)
    tl.debug_barrier()
    is_kept_M = is_kept_M > 0
    tl.store(parent_ptr + place_M, tl.load(place_ptr + up_M, mask=is_kept_M, other=0), mask=is_kept_M)
    tl.store(tokens_ptr + place_M, token_M, mask=is_kept_M)
    tl.store(depth_ptr + place_M, _depth_of(m_M, W).to(tl.int64), mask=is_kept_M)
    tl.debug_barrier()
    write_links(parent_ptr, tokens_ptr, mask_ptr, depth_ptr, first_child_ptr, next_sibling_ptr, root, num_nodes, N, D,
                BLOCK_N)  # fmt: skip


def tree_prune_kernel(
    root_B: Tensor,
    expansion: Expansion,
    correlations: Correlations,
    length_bonus: float,
    topk: int,
    depth: int,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    """Like the reference; raises ValueError for sizes and layouts that it does not take."""
    parents_BP, p_BC, tokens_BC = expansion
    (B, C), N, device = tokens_BC.shape, num_nodes, tokens_BC.device
    if topk + (depth - 1) * topk**2 != C:
        raise ValueError(f"{depth} steps of top-k {topk} have {topk + (depth - 1) * topk**2} candidates, got {C}")
    wanted = {
        "root": (root_B, (B,), torch.int64),
        "parents": (parents_BP, (B, parents_BP.shape[-1]), torch.int64),
        "p": (p_BC, (B, C), torch.float32),
        "tokens": (tokens_BC, (B, C), torch.int64),
    }
    check_layouts(wanted | correlations.layout())
    count = min(count, C)
    check_sizes(Sizes(C, count, num_nodes)._asdict(), MAX_SIZES._asdict())

    P, V = len(correlations.key_P), len(correlations.first_V)
    sums_BM = torch.empty(B, C + 1, dtype=torch.float64, device=device)
    up_BM, place_BM = (torch.empty(B, C + 1, dtype=torch.int32, device=device) for _ in range(2))
    parent_BN = torch.empty(B, N, dtype=torch.int32, device=device)
    tokens_BN, depth_BN, first_child_BN, next_sibling_BN = (
        torch.empty(B, N, dtype=torch.int64, device=device) for _ in range(4)
    )
    mask_BNN = torch.empty(B, N, N, dtype=torch.bool, device=device)
    num_nodes_B = torch.empty(B, dtype=torch.int64, device=device)
    block_M, block_K, block_N = (triton.next_power_of_2(n) for n in (C + 1, count, N))
    _prune_kernel[(B,)](
        root_B, parents_BP, p_BC, tokens_BC, *correlations, sums_BM, up_BM, place_BM, parent_BN, tokens_BN, mask_BNN,
        depth_BN, first_child_BN, next_sibling_BN, num_nodes_B, parents_BP.shape[1], C, topk, depth, count, N, V, P,
        P.bit_length(), BONUS=float(length_bonus), BLOCK_M=block_M, BLOCK_K=block_K, BLOCK_N=block_N, num_warps=4,
    )  # fmt: skip
    return SlimPosterior(tokens_BN, DraftTree(mask_BNN, depth_BN, first_child_BN, next_sibling_BN), num_nodes_B)
