"""SLiM's tree in two launches without a synchronisation: log r of all pairs of neighbouring candidates, then one
program a request that finds the hypotheses and writes their tree.

A hypothesis travels as (score, code): the ranks of its candidates, BITS each, the last one lowest; so its beginnings
are its code shifted, and codes of one length sort as their paths do. Letters are the reference's; E = lists, one of
each candidate of each position, S = candidates before T, n = nodes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.common.layout import check_layouts, check_sizes
from rayspec_kernels.common.topk import key_of, place_of, score_of
from rayspec_kernels.common.tree_links import write_bare_row, write_links
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import MAX_SIZES, Sizes, SlimPosterior


@triton.jit
def _possible(score):
    return tl.where(score < float("inf"), score, float("-inf"))


@triton.jit
def log_correlation(x, y, key_ptr, log_r_ptr, first_ptr, second_ptr, V, P, search_steps):
    """log r of tokens x and y, int64 of any shapes that broadcast; what is no token adds nothing of its own."""
    unseen = tl.load(first_ptr + x, mask=(x >= 0) & (x < V), other=0.0)
    unseen = unseen + tl.load(second_ptr + y, mask=(y >= 0) & (y < V), other=0.0)
    wanted = x * V + y
    place = tl.zeros_like(wanted).to(tl.int32)  # how many keys are known to be smaller
    for step in range(search_steps):
        probe = place + (1 << (search_steps - 1 - step))
        probed = tl.load(key_ptr + probe - 1, mask=probe <= P, other=0)
        place = tl.where((probe <= P) & (probed < wanted), probe, place)
    found = tl.load(key_ptr + place, mask=place < P, other=0)
    is_seen = (place < P) & (found == wanted)
    return tl.where(is_seen, tl.load(log_r_ptr + place, mask=is_seen, other=0.0), unseen)


@triton.jit(do_not_specialize=["P", "search_steps"])
def _pairs_kernel(root_ptr, ids_ptr, key_ptr, log_r_ptr, first_ptr, second_ptr, pair_ptr, mask_ptr, first_child_ptr,
                  D, k, N, V, P, search_steps, BLOCK_k: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Program (b, d) writes log r [s, t] of candidate t of position d after candidate s of the one before. It also
    writes what the next launch only adds to: a mask in which a node sees itself and the root, and links to nothing."""
    request, d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c_C = tl.arange(0, BLOCK_k)
    own_ptr = ids_ptr + (request * D + d) * k
    before_C = tl.load(own_ptr - k + c_C, mask=(c_C < k) & (d > 0), other=-1)
    before_C = tl.where(d > 0, before_C, tl.load(root_ptr + request))
    x_ST, y_ST = before_C[:, None], tl.load(own_ptr + c_C, mask=c_C < k, other=-1)[None, :]
    log_r_ST = log_correlation(x_ST, y_ST, key_ptr, log_r_ptr, first_ptr, second_ptr, V, P, search_steps)
    pair_ptrs = pair_ptr + ((request * D + d) * k + c_C[:, None]) * k + c_C[None, :]
    tl.store(pair_ptrs, _possible(log_r_ST), mask=(c_C < k)[:, None] & (c_C < k)[None, :])

    n_N = tl.arange(0, BLOCK_N)
    for node in range(d, N, D):
        write_bare_row(mask_ptr + request * N * N, node, N, BLOCK_N)
    tl.store(first_child_ptr + request * N + n_N, tl.full((BLOCK_N,), -1, tl.int64), mask=(n_N < N) & (d == 0))


@triton.jit
def _extended_key(scores_ptr, at_ST, length, is_pair_ST, pair_ST, own_T, K, BLOCK_k: tl.constexpr):
    """The first hypotheses of the lists of position d - 1 that are left, each continued by every candidate."""
    place_ST = tl.arange(0, BLOCK_k)[:, None] * K + at_ST
    is_left_ST = is_pair_ST & (at_ST < length)
    before_ST = tl.load(scores_ptr + place_ST, mask=is_left_ST, other=float("-inf"))
    return key_of((before_ST + pair_ST) + own_T[None, :], place_ST, is_left_ST)


@triton.jit
def _beginning(code_K, length_K, d, BITS: tl.constexpr):
    """Code of the first d + 1 candidates, -1 of a shorter hypothesis."""
    return tl.where(length_K > d, code_K >> (tl.maximum(length_K - 1 - d, 0) * BITS).to(tl.int64), -1)


@triton.jit
def _tree_kernel(root_ptr, ids_ptr, log_p_ptr, pair_ptr, scores_ptr, codes_ptr, parent_ptr, tokens_ptr, mask_ptr,
                 depth_ptr, first_child_ptr, next_sibling_ptr, num_nodes_ptr, D, k, K, N, length_bonus,
                 BITS: tl.constexpr, BLOCK_k: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
                 BLOCK_N: tl.constexpr):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    root = tl.load(root_ptr + request)
    ids_ptr += request * D * k
    log_p_ptr += request * D * k
    pair_ptr += request * D * k * k
    scores_ptr += request * D * k * K
    codes_ptr += request * D * k * K
    parent_ptr += request * N
    tokens_ptr += request * N
    depth_ptr += request * N
    mask_ptr += request * N * N
    first_child_ptr += request * N
    next_sibling_ptr += request * N

    # the lists of every position: the K best hypotheses that end in each candidate
    t_T = tl.arange(0, BLOCK_k)
    is_pair_ST = (t_T < k)[:, None] & (t_T < k)[None, :]
    own_T = _possible(tl.load(log_p_ptr + t_T, mask=t_T < k, other=float("-inf")) + length_bonus)
    tl.store(scores_ptr + t_T * K, tl.load(pair_ptr + t_T, mask=t_T < k, other=0.0) + own_T, mask=t_T < k)
    tl.store(codes_ptr + t_T * K, t_T.to(tl.int64), mask=t_T < k)
    length = 1
    for d in range(1, D):
        tl.debug_barrier()  # the lists of d - 1 are read by other threads than wrote them
        before_ptr = scores_ptr + (d - 1) * k * K
        own_T = _possible(tl.load(log_p_ptr + d * k + t_T, mask=t_T < k, other=float("-inf")) + length_bonus)
        pair_ptrs = pair_ptr + (d * k + t_T[:, None]) * k + t_T[None, :]
        pair_ST = tl.load(pair_ptrs, mask=is_pair_ST, other=float("-inf"))
        at_ST = tl.zeros((BLOCK_k, BLOCK_k), tl.int32)
        key_ST = _extended_key(before_ptr, at_ST, length, is_pair_ST, pair_ST, own_T, K, BLOCK_k)
        length_after = tl.minimum(K, length * k)
        for j in range(length_after):
            best_T = tl.max(key_ST, axis=0)
            code_T = tl.load(codes_ptr + (d - 1) * k * K + place_of(best_T), mask=t_T < k, other=0)
            tl.store(scores_ptr + (d * k + t_T) * K + j, score_of(best_T), mask=t_T < k)
            tl.store(codes_ptr + (d * k + t_T) * K + j, (code_T << BITS) | t_T, mask=t_T < k)
            at_ST += (key_ST == best_T[None, :]).to(tl.int32)
            key_ST = _extended_key(before_ptr, at_ST, length, is_pair_ST, pair_ST, own_T, K, BLOCK_k)
        length = length_after
    tl.debug_barrier()

    # the K best of all lists
    e_E, h_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    length_E = tl.zeros((BLOCK_E,), tl.int32)
    length = 1
    for d in range(D):
        length_E = tl.where(e_E // k == d, length, length_E)
        length = tl.minimum(K, length * k)
    at_E = tl.zeros((BLOCK_E,), tl.int32)
    place_K = tl.full((BLOCK_K,), -1, tl.int64)
    for h in range(K):
        is_left_E = at_E < length_E
        score_E = tl.load(scores_ptr + e_E * K + at_E, mask=is_left_E, other=float("-inf"))
        key_E = key_of(score_E, e_E * K + at_E, is_left_E)
        best = tl.max(key_E, axis=0)
        place_K = tl.where(h_K == h, place_of(best), place_K)
        at_E += (key_E == best).to(tl.int32)
    is_possible_K = tl.load(scores_ptr + place_K, mask=place_K >= 0, other=float("-inf")) > float("-inf")
    length_K = tl.where(is_possible_K, place_K // (k * K) + 1, 0).to(tl.int32)
    code_K = tl.load(codes_ptr + place_K, mask=is_possible_K, other=0)

    # a beginning is added by the best hypothesis that has it; those that fit are the first ones
    is_later_KK = h_K[:, None] < h_K[None, :]
    added_K = tl.zeros((BLOCK_K,), tl.int32)
    is_new_K = tl.zeros((BLOCK_K,), tl.int32)  # bit d: of its first d + 1 candidates
    for d in range(D):
        code_dK = _beginning(code_K, length_K, d, BITS)
        is_known_KK = is_later_KK & (code_dK[:, None] == code_dK[None, :])
        new_K = ((code_dK >= 0) & (tl.sum(is_known_KK.to(tl.int32), axis=0) == 0)).to(tl.int32)
        added_K += new_K
        is_new_K |= new_K << d
    upto_K = tl.cumsum(added_K, axis=0)
    is_taken_K = upto_K < N
    num_nodes = 1 + tl.max(tl.where(is_taken_K, upto_K, 0), axis=0)
    tl.store(num_nodes_ptr + request, num_nodes)

    # level by level; nodes of a level in the order of their codes
    place_K = tl.zeros((BLOCK_K,), tl.int32)
    level = 1
    for d in range(D):
        code_dK = _beginning(code_K, length_K, d, BITS)
        new_K = tl.where(is_taken_K, (is_new_K >> d) & 1, 0)
        is_before_KK = (new_K[:, None] > 0) & (code_dK[:, None] < code_dK[None, :])
        parent_K, place_K = place_K, level + tl.sum(is_before_KK.to(tl.int32), axis=0)
        token_K = tl.load(ids_ptr + d * k + (code_dK & ((1 << BITS) - 1)), mask=new_K > 0, other=0)
        tl.store(tokens_ptr + place_K, token_K, mask=new_K > 0)
        tl.store(depth_ptr + place_K, tl.full((BLOCK_K,), 1, tl.int64) + d, mask=new_K > 0)
        tl.store(parent_ptr + place_K, parent_K, mask=new_K > 0)
        level += tl.sum(new_K, axis=0)
    tl.debug_barrier()
    write_links(parent_ptr, tokens_ptr, mask_ptr, depth_ptr, first_child_ptr, next_sibling_ptr, root, num_nodes, N, D,
                BLOCK_N)  # fmt: skip


def slim_posterior_kernel(
    root_B: Tensor,
    ids_BDk: Tensor,
    log_p_BDk: Tensor,
    correlations: Correlations,
    length_bonus: float,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    """Like the reference; raises ValueError for sizes and layouts that it does not take."""
    _check(root_B, ids_BDk, log_p_BDk, correlations, count, num_nodes)
    (B, D, k), N, device = ids_BDk.shape, num_nodes, ids_BDk.device
    P, V = len(correlations.key_P), len(correlations.first_V)
    pair_BDkk = torch.empty(B, D, k, k, dtype=torch.float32, device=device)
    scores_BDkK = torch.empty(B, D, k, count, dtype=torch.float32, device=device)
    codes_BDkK = torch.empty(B, D, k, count, dtype=torch.int64, device=device)
    parent_BN = torch.empty(B, N, dtype=torch.int32, device=device)
    tokens_BN, depth_BN, first_child_BN, next_sibling_BN = (
        torch.empty(B, N, dtype=torch.int64, device=device) for _ in range(4)
    )
    mask_BNN = torch.empty(B, N, N, dtype=torch.bool, device=device)
    num_nodes_B = torch.empty(B, dtype=torch.int64, device=device)

    block_k, block_K, block_N = (triton.next_power_of_2(n) for n in (k, count, N))
    _pairs_kernel[(B, D)](
        root_B, ids_BDk, *correlations, pair_BDkk, mask_BNN, first_child_BN, D, k, N, V, P, P.bit_length(),
        BLOCK_k=block_k, BLOCK_N=block_N, num_warps=max(1, block_k**2 // 32),
    )  # fmt: skip
    # one warp keeps two of 8 x 8 pairs in a lane, and its reductions need no barrier: K D of them follow each other
    _tree_kernel[(B,)](
        root_B, ids_BDk, log_p_BDk, pair_BDkk, scores_BDkK, codes_BDkK, parent_BN, tokens_BN, mask_BNN, depth_BN,
        first_child_BN, next_sibling_BN, num_nodes_B, D, k, count, N, length_bonus + 0.0,
        BITS=block_k.bit_length() - 1, BLOCK_k=block_k, BLOCK_K=block_K, BLOCK_E=triton.next_power_of_2(D * k),
        BLOCK_N=block_N, num_warps=max(1, block_k**2 // 64), num_stages=1,
    )  # fmt: skip
    return SlimPosterior(tokens_BN, DraftTree(mask_BNN, depth_BN, first_child_BN, next_sibling_BN), num_nodes_B)


def _check(
    root_B: Tensor, ids_BDk: Tensor, log_p_BDk: Tensor, correlations: Correlations, count: int, num_nodes: int
) -> None:
    B, D, k = ids_BDk.shape
    wanted = correlations.layout() | {
        "root": (root_B, (B,), torch.int64),
        "ids": (ids_BDk, (B, D, k), torch.int64),
        "log_p": (log_p_BDk, (B, D, k), torch.float32),
    }
    check_layouts(wanted)
    check_sizes(Sizes(D, k, count, num_nodes)._asdict(), MAX_SIZES._asdict())
