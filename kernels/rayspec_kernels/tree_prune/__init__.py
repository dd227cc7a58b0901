"""SLiM's choice from the tree that EAGLE-2 expands."""

import torch
from torch import Tensor

from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.common.layout import fits
from rayspec_kernels.slim_posterior import fake_tree
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import SlimPosterior
from rayspec_kernels.tree_prune.reference import MAX_SIZES, Expansion, Sizes, tree_prune_reference


@torch.library.custom_op("rayspec::tree_prune", mutates_args=())
def _tree_prune(
    root_B: Tensor,
    parents_BP: Tensor,
    p_BC: Tensor,
    tokens_BC: Tensor,
    key_P: Tensor,
    log_r_P: Tensor,
    first_V: Tensor,
    second_V: Tensor,
    length_bonus: float,
    topk: int,
    depth: int,
    count: int,
    num_nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from rayspec_kernels.tree_prune.kernel import tree_prune_kernel

    correlations = Correlations(key_P, log_r_P, first_V, second_V)
    expansion = Expansion(parents_BP, p_BC, tokens_BC)
    found = tree_prune_kernel(root_B, expansion, correlations, length_bonus, topk, depth, count, num_nodes)
    return found.tokens_BN, *found.links, found.num_nodes_B


_tree_prune.register_fake(fake_tree)


def tree_prune(
    root_B: Tensor,
    expansion: Expansion,
    correlations: Correlations,
    length_bonus: float,
    topk: int,
    depth: int,
    count: int,
    num_nodes: int,
) -> SlimPosterior:
    """The tree of the `count` best candidates of a draft loop and of all their ancestors, cut to `num_nodes` with the
    root: as many of the best as fit with their ancestors, and no other.

    A candidate scores log p, that of its whole path, and for every node of the path log r of the token before it and
    its own, the root's (int64 `root_B`) before the first, plus `length_bonus`, in float64. Of equal scores the
    candidate with the lower number is better. One with a score of -inf is never taken, nor one with a NaN or +inf on
    its way. Nodes keep the order of the loop, which took `depth` steps with `topk` in its beam. Nothing synchronises.
    """
    C = expansion.tokens_BC.shape[1]
    if fits(Sizes(C, min(count, C), num_nodes), MAX_SIZES) and uses_kernel(
        expansion.p_BC, root_B, *expansion, *correlations
    ):
        tokens_BN, *links, num_nodes_B = _tree_prune(
            *(t.contiguous() for t in (root_B, *expansion)), *correlations, length_bonus, topk, depth, count, num_nodes
        )
        return SlimPosterior(tokens_BN, DraftTree(*links), num_nodes_B)
    return tree_prune_reference(root_B, expansion, correlations, length_bonus, topk, depth, count, num_nodes)
