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
    path_BD = torch.tensor([path + [-1] * (width - len(path)) for path in paths], dtype=torch.int64, device=device)
    num_drafts_B = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int64, device=device)
    return Accepted(path_BD, num_drafts_B, torch.tensor(bonus, dtype=torch.int64, device=device))


def verify_greedy_reference(
    tokens_BN: Tensor, target_BN: Tensor, first_child_BN: Tensor, next_sibling_BN: Tensor, max_path: int
) -> Accepted:
    """Follow the target's argmax `target_BN` down the tree; of equal siblings the first wins."""
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
    """Exact sampling over a chain or tree of best tokens: the emitted tokens follow the target's distribution.

    At a node one uniform coin is held against the running sum of its children's target probabilities, which is the
    same as visiting them in turn and renormalising after each rejection. If none is accepted, the token is drawn from
    the target distribution with the visited children removed. A repeated sibling token is skipped.

    Args:
        target_BNV: the target's processed probabilities after each node; rows sum to 1.
        coins_BN, final_coins_B: uniform in [0, 1); a coin a node and one for the final draw.
    """
    tokens, coins = tokens_BN.tolist(), coins_BN.tolist()
    first, sibling = first_child_BN.tolist(), next_sibling_BN.tolist()
    paths, rejected = [], []
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
        paths.append(path)
        rejected.append(visited)
    p_BV = torch.stack([target_BNV[b, path[-1]] for b, path in enumerate(paths)]).double()
    rest_BV = p_BV.clone()
    for b, visited in enumerate(rejected):
        rest_BV[b, visited] = 0.0
    return _pack(paths, _draw(rest_BV, p_BV, final_coins_B).tolist(), max_path, tokens_BN.device)


def verify_chain_reference(
    tokens_BN: Tensor, target_BNV: Tensor, draft_BKV: Tensor, coins_BN: Tensor, final_coins_B: Tensor
) -> Accepted:
    """Exact sampling over a chain of drafts that were themselves drawn (Leviathan et al. 2023).

    Draft y of node i + 1 is accepted with probability min(1, p(y) / q(y)). At the first rejection the token is drawn
    from max(p - q, 0), renormalised, over the whole vocabulary; after the last draft from p.

    Args:
        target_BNV: the target's processed probabilities p after each node; rows sum to 1.
        draft_BKV: K = N - 1; the distribution q that the draft of node i + 1 was drawn from, in target ids, 0 off its
            support. Not the drafter's softmax over more tokens than it could draw: that is not exact.
        coins_BN, final_coins_B: uniform in [0, 1); a coin a node and one for the final draw.
    """
    B, N = tokens_BN.shape
    drafted_BK1 = tokens_BN[:, 1:, None].long()
    p_BK = target_BNV[:, :-1].gather(2, drafted_BK1).squeeze(2).double()
    q_BK = draft_BKV.gather(2, drafted_BK1).squeeze(2).double()
    accepted_BK = (q_BK > 0) & (coins_BN[:, :-1].double() * q_BK < p_BK)
    num_drafts_B = accepted_BK.long().cumprod(dim=1).sum(dim=1)

    row_B = torch.arange(B, device=tokens_BN.device)
    p_BV = target_BNV[row_B, num_drafts_B].double()
    q_BV = draft_BKV[row_B, num_drafts_B.clamp(max=N - 2)].double()
    q_BV = torch.where(num_drafts_B[:, None] == N - 1, 0.0, q_BV)  # nothing was drafted after the last draft
    bonus_B = _draw((p_BV - q_BV).clamp_min(0.0), p_BV, final_coins_B)
    node_N = torch.arange(N, device=tokens_BN.device)
    return Accepted(torch.where(node_N <= num_drafts_B[:, None], node_N, -1), num_drafts_B, bonus_B)


def _draw(weights_BV: Tensor, otherwise_BV: Tensor, coins_B: Tensor) -> Tensor:
    """The token [B] at a uniform coin of each row's weights (float64), or of `otherwise` where none has weight."""
    # rounding can reject a draft with all of the mass, or where p equals q
    weights_BV = torch.where(weights_BV.sum(dim=-1, keepdim=True) > 0.0, weights_BV, otherwise_BV)
    cumulative_BV = weights_BV.cumsum(dim=-1)
    drawn_B = torch.searchsorted(cumulative_BV, coins_B.double()[:, None] * cumulative_BV[:, -1:], right=True)
    last_B = torch.where(weights_BV > 0.0, torch.arange(weights_BV.shape[-1], device=weights_BV.device), 0).amax(dim=-1)
    return torch.minimum(drawn_B.squeeze(1), last_B)
