"""Verification of trees whose siblings were drawn without replacement, in plain torch for every device.

B = requests, N = nodes of a tree, n = nodes with children, C = most children of a node, R = distributions that siblings
were drawn from, V = vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_MIN = torch.finfo(torch.float32).tiny


class Siblings(NamedTuple):
    """Which nodes of a tree of one shape were drawn together, and from which distribution. All int64."""

    parent_n: Tensor  # node numbers
    children_nC: Tensor  # node numbers in the order of the draws, -1 after the last
    distribution_n: Tensor  # in 0..R-1


def sibling_distribution_reference(
    target_BNV: Tensor, draft_BRV: Tensor, tokens_BN: Tensor, siblings: Siblings
) -> Tensor:
    """The distribution [B, N, V] to verify a tree by as if its nodes were fixed, so that this is exact and uses the
    drafts' distribution.

    Recursive rejection sampling without replacement (Jeon et al. 2024, arXiv 2402.14160; SpecInfer's multi-step
    speculative sampling, where siblings may repeat): at a node with the target's distribution p and children drawn in
    turn from q, child y is accepted with min(1, p(y) / q(y)); after a rejection p becomes max(p - q, 0) renormalised,
    and q loses y. A rejected y has p(y) < q(y), so that none of its mass is left. Given the children, the next token of
    all this is therefore drawn from one distribution: the chance to be accepted for each child, and what is left of p
    elsewhere. Whoever visits children in turn by that distribution, and draws the token from the rest of it where none
    is accepted, does the same.

    Children beyond the support of q (a filter may leave fewer tokens than a node has children) may be any tokens that
    are chosen before the verification: they are accepted with what is left of p at them, and q stays what it is.

    Args:
        target_BNV: float32, the target's probabilities p after each node; rows sum to 1.
        draft_BRV: float32, the distributions q that siblings were drawn from, in target ids; rows sum to 1.
        tokens_BN: int64; siblings differ.
    """
    p_BnV, q_BnV = target_BNV[:, siblings.parent_n], draft_BRV[:, siblings.distribution_n]
    reached_Bn1 = torch.ones_like(p_BnV[:, :, :1])  # that all children before were rejected
    chances: list[tuple[Tensor, Tensor]] = []
    for child_n in siblings.children_nC.T:
        is_child_n1 = (child_n >= 0)[:, None]
        token_Bn1 = tokens_BN[:, child_n.clamp(min=0), None]
        p_Bn1, q_Bn1 = p_BnV.gather(2, token_Bn1), q_BnV.gather(2, token_Bn1)
        rest_BnV = (p_BnV - q_BnV * (q_Bn1 > 0)).clamp(min=0).scatter(2, token_Bn1, 0.0)
        rest_Bn1 = rest_BnV.sum(dim=2, keepdim=True)
        accepted_Bn1 = torch.where(q_Bn1 > 0, (p_Bn1 / q_Bn1.clamp(min=_MIN)).clamp(max=1), p_Bn1)
        # where nothing is left to draw after a rejection, rounding alone could reject
        accepted_Bn1 = torch.where(is_child_n1, torch.where(rest_Bn1 > 0, accepted_Bn1, 1.0), 0.0)
        chances.append((token_Bn1, reached_Bn1 * accepted_Bn1))
        reached_Bn1 = reached_Bn1 * (1 - accepted_Bn1)
        left_BnV = q_BnV.scatter(2, token_Bn1, 0.0)
        p_BnV = torch.where(is_child_n1, rest_BnV / rest_Bn1.clamp(min=_MIN), p_BnV)
        q_BnV = torch.where(is_child_n1, left_BnV / left_BnV.sum(dim=2, keepdim=True).clamp(min=_MIN), q_BnV)
    probs_BnV = reached_Bn1 * p_BnV
    for token_Bn1, chance_Bn1 in chances:
        probs_BnV.scatter_add_(2, token_Bn1, chance_Bn1)
    return target_BNV.index_copy(1, siblings.parent_n, probs_BnV)
