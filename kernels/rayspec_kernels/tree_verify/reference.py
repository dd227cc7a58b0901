"""Verification of draft trees in plain Python over torch tensors.

B = requests, N = tree nodes including the root, D = longest accepted path including the root, V = vocabulary.

The walk is a loop over few nodes with data-dependent ends, which Python over lists does faster on a CPU than a dozen
tiny tensor operations a level.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Accepted(NamedTuple):
    """Paths in node numbers of the own request."""

    path_BD: Tensor  # int64: root first, -1 after the end
    num_drafts_B: Tensor  # int64: accepted drafted nodes (path length - 1)
    bonus_B: Tensor  # int64: the target's token after the path


def _siblings(first: int, next_sibling: list[int]) -> list[int]:
    nodes = []
    while first != -1:
        nodes.append(first)
        first = next_sibling[first]
    return nodes


def _pack(paths: list[list[int]], bonus: list[int], width: int, device: torch.device) -> Accepted:
    path_BD = torch.full((len(paths), width), -1, dtype=torch.int64)
    for row, path in enumerate(paths):
        path_BD[row, : len(path)] = torch.tensor(path)
    num_drafts_B = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64)
    return Accepted(path_BD.to(device), num_drafts_B.to(device), torch.tensor(bonus, dtype=torch.int64).to(device))


def verify_greedy_reference(
    tokens_BN: Tensor, target_BN: Tensor, first_child_BN: Tensor, next_sibling_BN: Tensor, max_path: int
) -> Accepted:
    """Follow the target's argmax `target_BN` down the tree; of equal siblings the first wins (METHODS 1.1)."""
    tokens, target = tokens_BN.tolist(), target_BN.tolist()
    first, sibling = first_child_BN.tolist(), next_sibling_BN.tolist()
    paths = []
    for b in range(len(tokens)):
        path = [0]
        while len(path) < max_path:
            children = _siblings(first[b][path[-1]], sibling[b])
            match = next((c for c in children if tokens[b][c] == target[b][path[-1]]), None)
            if match is None:
                break
            path.append(match)
        paths.append(path)
    bonus = [target[b][path[-1]] for b, path in enumerate(paths)]
    return _pack(paths, bonus, max_path, tokens_BN.device)


def verify_sampled_reference(
    tokens_BN: Tensor,
    target_BNV: Tensor,
    first_child_BN: Tensor,
    next_sibling_BN: Tensor,
    coins_BN: Tensor,
    final_coins_B: Tensor,
    max_path: int,
) -> Accepted:
    """Exact sampling over deterministic proposals (METHODS 1.4): the emitted tokens follow the target's law.

    At a node one uniform coin is held against the running sum of its children's target probabilities, which is the
    same as visiting them in turn and renormalising after each rejection. If none is accepted, the token is drawn from
    the target law with the visited children removed. A repeated sibling token is skipped.

    Args:
        target_BNV: the target's processed probabilities after each node; rows sum to 1.
        coins_BN, final_coins_B: uniform in [0, 1); a coin a node and one for the final draw.
    """
    tokens, coins = tokens_BN.tolist(), coins_BN.tolist()
    first, sibling = first_child_BN.tolist(), next_sibling_BN.tolist()
    paths, bonus = [], []
    for b in range(len(tokens)):
        path = [0]
        while True:
            node = path[-1]
            p_V = target_BNV[b, node]
            visited: list[int] = []
            accepted, mass = None, 0.0
            if len(path) < max_path:
                for child in _siblings(first[b][node], sibling[b]):
                    token = tokens[b][child]
                    if token in visited:
                        continue
                    mass += float(p_V[token])
                    visited.append(token)
                    if coins[b][node] < mass:
                        accepted = child
                        break
            if accepted is None:
                break
            path.append(accepted)
        rest_V = p_V.double().clone()
        rest_V[visited] = 0.0
        if float(rest_V.sum()) <= 0.0:  # the children hold all mass and rounding rejected them
            rest_V = p_V.double()
        cumulative_V = rest_V.cumsum(dim=0)
        drawn = torch.searchsorted(cumulative_V, final_coins_B[b].double() * cumulative_V[-1], right=True)
        bonus.append(int(drawn.clamp(max=int(rest_V.nonzero()[-1]))))
        paths.append(path)
    return _pack(paths, bonus, max_path, tokens_BN.device)


def keep_top_k_reference(p_TV: Tensor, top_k_T: Tensor) -> Tensor:
    """Zero all but the k most likely tokens of each row and renormalise; ties at rank k are kept."""
    sorted_TV = p_TV.sort(dim=-1, descending=True).values
    k_T = top_k_T.long().clamp(1, p_TV.shape[-1])
    kept_TV = p_TV.masked_fill(p_TV < sorted_TV.gather(1, k_T[:, None] - 1), 0.0)
    return kept_TV / kept_TV.sum(dim=-1, keepdim=True)


def keep_top_p_reference(p_TV: Tensor, top_p_T: Tensor) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, and renormalise."""
    sorted_TV, order_TV = p_TV.sort(dim=-1, descending=True)
    before_TV = sorted_TV.cumsum(dim=-1) - sorted_TV
    kept_TV = sorted_TV.masked_fill(before_TV > top_p_T[:, None], 0.0)
    out_TV = torch.zeros_like(p_TV).scatter_(1, order_TV, kept_TV)
    return out_TV / out_TV.sum(dim=-1, keepdim=True)
