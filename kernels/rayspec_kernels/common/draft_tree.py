"""Tree tensors of an EAGLE-2 style draft tree in plain torch.

B = requests, N = verified nodes including the root, M = N - 1 drafted nodes, W = top-k of the draft loop.

The draft loop numbers every candidate it scored: the W candidates of step 0 are 0..W-1, those of step s >= 1 follow in
blocks of W * W. `selected_BM` are the kept numbers, ascending, so that a parent precedes its children. The candidate
with number c was expanded from beam entry c // W, where entry 0 is the root and `parents[c // W]` otherwise is the
number of the parent candidate.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DraftTree(NamedTuple):
    """Node 0 of each request is the root (the last verified token); -1 marks 'none'."""

    mask_BNN: Tensor  # bool: node i attends to node j (itself and its ancestors)
    depth_BN: Tensor  # int64: 0 for the root
    first_child_BN: Tensor  # int64
    next_sibling_BN: Tensor  # int64


def build_tree_reference(parents_BP: Tensor, selected_BM: Tensor, topk: int) -> DraftTree:
    """Link the selected candidates. A candidate whose parent was not selected (possible only among equal scores)
    stays unlinked, so that it is never accepted."""
    B = len(selected_BM)
    entry_BM = selected_BM // topk
    from_root_BM = entry_BM == 0
    if parents_BP.shape[1]:
        parent_number_BM = parents_BP.gather(1, entry_BM.clamp(max=parents_BP.shape[1] - 1))
    else:  # one draft step: only children of the root
        parent_number_BM = torch.zeros_like(selected_BM)
    is_parent_BMM = parent_number_BM[:, :, None] == selected_BM[:, None, :]
    found_BM = is_parent_BMM.any(dim=2)
    parent_BM = torch.where(from_root_BM, 0, torch.where(found_BM, is_parent_BMM.int().argmax(dim=2) + 1, -1))
    depth = 1 + -(-max(0, parents_BP.shape[1] - 1) // topk)  # a step of the loop records `topk` parents
    return link_tree_reference(torch.cat([parent_BM.new_full((B, 1), -1), parent_BM], dim=1), depth)


def link_tree_reference(parent_BN: Tensor, depth: int) -> DraftTree:
    """Any tree, from the number of each node's parent: node 0 is the root, parents precede their children. A node
    other than the root with parent -1 is linked to nothing, so that it is never accepted; it sees itself and the root.
    `depth`: at least that of the deepest node. Nothing synchronises.
    """
    (B, N), device = parent_BN.shape, parent_BN.device
    up_BN = parent_BN.clamp(min=0)
    ancestors = [up_BN]
    for _ in range(depth - 2):
        ancestors.append(up_BN.gather(1, ancestors[-1]))
    ancestor_BNd = torch.stack(ancestors, dim=2)
    mask_BNN = torch.eye(N, dtype=torch.bool, device=device).repeat(B, 1, 1)
    mask_BNN[:, :, 0] = True  # every node sees the root
    mask_BNN.scatter_(2, ancestor_BNd, True)
    depth_BN = (ancestor_BNd > 0).sum(dim=2) + 1
    depth_BN[:, 0] = 0

    # siblings side by side, behind the nodes without a parent; column N takes what is nobody's link
    sorted_BN, order_BN = parent_BN.sort(dim=1, stable=True)
    before_BM, sorted_BM, order_BM = sorted_BN[:, :-1], sorted_BN[:, 1:], order_BN[:, 1:]
    is_sibling_BM = sorted_BM == before_BM
    is_later_BM, is_first_BM = is_sibling_BM & (sorted_BM >= 0), ~is_sibling_BM
    nowhere_BN = torch.full((B, N + 1), -1, device=device)
    first_child_BN = nowhere_BN.scatter(1, torch.where(is_first_BM, sorted_BM, N), order_BM)
    next_sibling_BN = nowhere_BN.scatter(1, torch.where(is_later_BM, order_BN[:, :-1], N), order_BM)
    return DraftTree(mask_BNN, depth_BN, first_child_BN[:, :N], next_sibling_BN[:, :N])


def full_mask_reference(mask_BNN: Tensor, prefix_B: Tensor, out: Tensor) -> None:
    """Write the masks in the layout of SGLang's FULL_MASK: of each request in turn [N, prefix + N], in which every node
    sees the whole prefix. Without any look at values.

    Args:
        prefix_B: int64, length of each request's context before the tree.
        out: bool, or uint8 as some backends have it, one-dimensional; at least as long as all of them together, the
            rest is set to True.
    """
    N = mask_BNN.shape[1]
    width_B = prefix_B + N
    first_B = N * (width_B.cumsum(0) - width_B)
    node_N = torch.arange(N, device=mask_BNN.device)
    place_BNN = (first_B + prefix_B)[:, None, None] + node_N[:, None] * width_B[:, None, None] + node_N
    out.fill_(True)
    out[place_BNN.flatten()] = mask_BNN.flatten().to(out.dtype)


def build_chain_reference(batch_size: int, num_nodes: int, device: torch.device) -> DraftTree:
    """The tree of top-k 1: node i is the only child of node i - 1."""
    nodes_N = torch.arange(num_nodes, device=device)
    first_child_N = torch.where(nodes_N + 1 < num_nodes, nodes_N + 1, -1)
    mask_NN = torch.ones(num_nodes, num_nodes, dtype=torch.bool, device=device).tril()
    return DraftTree(
        mask_NN.expand(batch_size, -1, -1),
        nodes_N.expand(batch_size, -1),
        first_child_N.expand(batch_size, -1),
        torch.full((1, 1), -1, device=device).expand(batch_size, num_nodes),
    )
