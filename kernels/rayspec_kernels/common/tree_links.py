"""What the kernels that choose a tree share: links and mask from the parent of every node.

n = nodes of a tree, in which parents precede their children and siblings lie side by side.
"""

import triton
import triton.language as tl


@triton.jit
def write_bare_row(mask_ptr, node, N, BLOCK_N: tl.constexpr):
    """A node sees itself and the root."""
    n_N = tl.arange(0, BLOCK_N)
    tl.store(mask_ptr + node * N + n_N, (n_N == 0) | (n_N == node), mask=n_N < N)


@triton.jit
def write_links(parent_ptr, tokens_ptr, mask_ptr, depth_ptr, first_child_ptr, next_sibling_ptr, root, num_nodes, N, D,
                BLOCK_N: tl.constexpr):  # fmt: skip
    """Write for one request what is left when tokens, depths and parents of the nodes 1..num_nodes - 1 are written, as
    are bare rows of the mask and first children of -1, and a barrier has passed. No node is deeper than D."""
    n_N = tl.arange(0, BLOCK_N)
    is_node_N = (n_N > 0) & (n_N < num_nodes)
    parent_N = tl.load(parent_ptr + n_N, mask=is_node_N, other=-1)
    left_N = tl.load(parent_ptr + n_N - 1, mask=is_node_N & (n_N > 1), other=-1)
    right_N = tl.load(parent_ptr + n_N + 1, mask=n_N + 1 < num_nodes, other=-1)
    next_sibling_N = tl.where(is_node_N & (right_N == parent_N), n_N + 1, -1)
    tl.store(next_sibling_ptr + n_N, next_sibling_N.to(tl.int64), mask=n_N < N)
    tl.store(first_child_ptr + parent_N, n_N.to(tl.int64), mask=is_node_N & (left_N != parent_N))
    # the root and the padding
    tl.store(tokens_ptr + n_N, tl.full((BLOCK_N,), 0, tl.int64) + root, mask=(n_N < N) & (is_node_N == 0))
    tl.store(depth_ptr + n_N, (n_N > 0).to(tl.int64), mask=(n_N < N) & (is_node_N == 0))
    ancestor_N = parent_N
    for _ in range(D - 1):
        is_inner_N = ancestor_N > 0
        tl.store(mask_ptr + n_N * N + ancestor_N, is_inner_N, mask=is_inner_N)
        ancestor_N = tl.load(parent_ptr + ancestor_N, mask=is_inner_N, other=0)
