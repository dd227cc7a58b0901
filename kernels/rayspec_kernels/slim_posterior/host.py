"""slim_posterior on a CPU, request by request: all hypotheses are enumerated, the tree is built node by node.

A draft step has some thousand numbers, on which torch's hundred and fifty calls cost several times what this does: with
D = 4, k = 10, K = 20 and one thread 0.15 ms against 0.49 for one request, as much for eight.

Letters are the reference's; M = all hypotheses, n = nodes.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import Sizes, SlimPosterior

_MAX_HYPOTHESES = 2**14  # to enumerate


def fits_host(sizes: Sizes) -> bool:
    return sum(sizes.candidates**d for d in range(1, sizes.positions + 1)) <= _MAX_HYPOTHESES


def slim_posterior_host(
    root_B: Tensor,
    ids_BDk: Tensor,
    log_p_BDk: Tensor,
    correlations: Correlations,
    length_bonus: float,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    (B, D, k), N = ids_BDk.shape, num_nodes
    scores_BM = _scores(root_B, ids_BDk, log_p_BDk, correlations, length_bonus)
    number_M = _numbers(D, k)
    tokens_BN = root_B[:, None].repeat(1, N).numpy()
    depth_BN = np.ones((B, N), dtype=np.int64)
    first_child_BN, next_sibling_BN = (np.full((B, N), -1) for _ in range(2))
    mask_BNN = np.zeros((B, N, N), dtype=bool)
    mask_BNN[:, :, 0] = mask_BNN[:, np.arange(N), np.arange(N)] = True
    num_nodes_B = np.empty(B, dtype=np.int64)
    for b in range(B):
        nodes_n = _nodes(number_M[_best(scores_BM[b], count)].tolist(), k, N)
        place = {node: n for n, node in enumerate(nodes_n)}
        paths: list[list[int]] = [[]]  # of each node: the ancestors below the root and the node itself
        youngest: dict[int, int] = {}
        for n, node in enumerate(nodes_n[1:], start=1):
            parent = place[(node - 1) // k]
            paths.append([*paths[parent], n])
            if parent in youngest:
                next_sibling_BN[b, youngest[parent]] = n
            else:
                first_child_BN[b, parent] = n
            youngest[parent] = n
        num_nodes_B[b] = len(nodes_n)
        depth_n = [len(path) for path in paths]
        depth_BN[b, : len(nodes_n)] = depth_n
        rank_n = [(node - 1) % k for node in nodes_n[1:]]
        tokens_BN[b, 1 : len(nodes_n)] = ids_BDk.numpy()[b, np.array(depth_n[1:], dtype=np.int64) - 1, rank_n]
        mask_BNN[b, np.repeat(np.arange(len(nodes_n)), depth_n), [n for path in paths for n in path]] = True
    links = DraftTree(*map(torch.from_numpy, (mask_BNN, depth_BN, first_child_BN, next_sibling_BN)))
    return SlimPosterior(torch.from_numpy(tokens_BN), links, torch.from_numpy(num_nodes_B))


@np.errstate(invalid="ignore")  # inf - inf, which makes a hypothesis impossible
def _scores(
    root_B: Tensor, ids_BDk: Tensor, log_p_BDk: Tensor, correlations: Correlations, length_bonus: float
) -> NDArray[np.float32]:
    """The score of every hypothesis, in the order of `_numbers`; -inf for an impossible one."""
    ids, (key_P, log_r_P, first_V, second_V) = ids_BDk.numpy(), (x.numpy() for x in correlations)
    B, D, k = ids.shape
    before_BDk = np.concatenate([np.broadcast_to(root_B.numpy()[:, None, None], (B, 1, k)), ids[:, :-1]], axis=1)
    x, y = before_BDk[:, :, None, :], ids[:, :, :, None]
    pair_BDkk = first_V[x] + second_V[y]
    if len(key_P):
        wanted = x * len(first_V) + y
        place = np.minimum(np.searchsorted(key_P, wanted), len(key_P) - 1)
        pair_BDkk = np.where(key_P[place] == wanted, log_r_P[place], pair_BDkk)
    own_BDk = log_p_BDk.numpy() + np.float32(length_bonus + 0.0)  # no score is -0
    scores = [pair_BDkk[:, 0, :, :1] + own_BDk[:, 0, :, None]]  # [B, t, what is before t]
    for d in range(1, D):
        extended_BtsM = scores[-1][:, None] + pair_BDkk[:, d, :, :, None]
        scores.append((extended_BtsM + own_BDk[:, d, :, None, None]).reshape(B, k, -1))
    scores_BM = np.concatenate([s.reshape(B, -1) for s in scores], axis=1)
    return np.where(scores_BM < np.inf, scores_BM, np.float32(-np.inf))


@lru_cache(maxsize=8)
def _numbers(D: int, k: int) -> NDArray[np.int64]:
    """The number of every hypothesis: shorter ones first, then by their last rank, by the one before it, and so on."""
    first_k1 = np.arange(1, k + 1)[:, None]
    numbers = [first_k1]
    for _ in range(1, D):
        numbers.append(numbers[-1].ravel() * k + first_k1)
    return np.concatenate([n.ravel() for n in numbers])


def _best(scores_M: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Places of the possible ones of the best, best first; of equal scores the first."""
    least = np.partition(scores_M, -count)[-count] if count < len(scores_M) else np.float32(-np.inf)
    place_m = np.flatnonzero((scores_M >= least) & (scores_M > -np.inf))
    return place_m[np.argsort(-scores_M[place_m], kind="stable")[:count]]


def _nodes(numbers: list[int], k: int, num_nodes: int) -> list[int]:
    """The root, as many of these hypotheses as fit with all of their beginnings, and these, in order."""
    nodes = {0}
    for number in numbers:
        added = []
        while number not in nodes:
            added.append(number)
            number = (number - 1) // k
        if len(nodes) + len(added) > num_nodes:
            break
        nodes.update(added)
    return sorted(nodes)
