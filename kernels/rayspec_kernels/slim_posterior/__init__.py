"""SLiM's tree of the likeliest hypotheses, from a drafter's candidates and pair correlations."""

from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.common.layout import fits
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.host import fits_host, slim_posterior_host
from rayspec_kernels.slim_posterior.reference import MAX_SIZES, Sizes, SlimPosterior, slim_posterior_reference


@torch.library.custom_op("rayspec::slim_posterior", mutates_args=())
def _slim_posterior(
    root_B: Tensor,
    ids_BDk: Tensor,
    log_p_BDk: Tensor,
    key_P: Tensor,
    log_r_P: Tensor,
    first_V: Tensor,
    second_V: Tensor,
    length_bonus: float,
    count: int,
    num_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from rayspec_kernels.slim_posterior.kernel import slim_posterior_kernel

    correlations = Correlations(key_P, log_r_P, first_V, second_V)
    found = slim_posterior_kernel(root_B, ids_BDk, log_p_BDk, correlations, length_bonus, count, num_nodes)
    return found.tokens_BN, *found.links, found.num_nodes_B


@_slim_posterior.register_fake
def fake_tree(root_B: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Empty outputs of any operator whose first argument is the roots and whose last one the number of nodes."""
    B, N = len(root_B), rest[-1]
    mask_BNN = root_B.new_empty(B, N, N, dtype=torch.bool)
    tokens_BN, depth_BN, first_child_BN, next_sibling_BN = (root_B.new_empty(B, N) for _ in range(4))
    return tokens_BN, mask_BNN, depth_BN, first_child_BN, next_sibling_BN, root_B.new_empty(B)


def slim_posterior(
    root_B: Tensor,
    ids_BDk: Tensor,
    log_p_BDk: Tensor,
    correlations: Correlations,
    length_bonus: float,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    """The tree of the `count` best hypotheses and all of their beginnings, cut to `num_nodes` with the root.

    A hypothesis of j tokens scores the sum of its tokens' log-probabilities (float32), of log r of its neighbours, the
    root's token before the first, and of j times `length_bonus`, added up from the root on in this order. Ties: see the
    reference. One with a score of -inf is never taken, nor one with a NaN or +inf on its way. A candidate with id -1
    must have log-probability -inf. Nothing synchronises.
    """
    _, D, k = ids_BDk.shape
    sizes = Sizes(D, k, count, num_nodes)
    if fits(sizes, MAX_SIZES) and uses_kernel(log_p_BDk, root_B, ids_BDk, *correlations):
        tokens_BN, *links, num_nodes_B = _slim_posterior(
            *(t.contiguous() for t in (root_B, ids_BDk, log_p_BDk)), *correlations, length_bonus, count, num_nodes
        )
        return SlimPosterior(tokens_BN, DraftTree(*links), num_nodes_B)
    if ids_BDk.device.type == "cpu" and fits_host(sizes):
        return slim_posterior_host(root_B, ids_BDk, log_p_BDk, correlations, length_bonus, count, num_nodes)
    return slim_posterior_reference(root_B, ids_BDk, log_p_BDk, correlations, length_bonus, count, num_nodes)
