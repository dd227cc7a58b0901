"""Pruning of a scored tree against a walk over its nodes, and the kernel against the reference, bit for bit."""

import itertools

import pytest
import torch
from torch import Tensor

from rayspec_kernels.common.draft_tree import DraftTree
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import SlimPosterior
from rayspec_kernels.tree_prune import _tree_prune, tree_prune
from rayspec_kernels.tree_prune.bench import random_expansion
from rayspec_kernels.tree_prune.kernel import tree_prune_kernel
from rayspec_kernels.tree_prune.reference import (
    Expansion,
    expansion_parents_reference,
    path_sums_reference,
    prune_tree_reference,
    tree_prune_reference,
)

INF, V = float("inf"), 11
Inputs = tuple[Tensor, Expansion, Correlations]


def random_tree(B: int, M: int, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(parents, scores) [B, M]; a child may outrank its parent, and some nodes are impossible."""
    generator = torch.Generator().manual_seed(seed)
    parent_BM = torch.zeros(B, M, dtype=torch.int64)
    for b in range(B):
        level = [0]
        for n in range(1, M):
            shallow = [m for m in range(n) if level[m] < depth]
            parent_BM[b, n] = shallow[int(torch.randint(len(shallow), (1,), generator=generator))]
            level.append(level[int(parent_BM[b, n])] + 1)
    score_BM = torch.randn(B, M, generator=generator, dtype=torch.float64)
    return parent_BM, score_BM.masked_fill(torch.rand(B, M, generator=generator) < 0.2, -INF)


def literal(parent_M: list[int], score_M: list[float], count: int, num_nodes: int) -> list[int]:
    """The nodes that stay, the root first."""
    possible = [n for n in range(1, len(parent_M)) if score_M[n] > -INF]
    kept = {0}
    for node in sorted(possible, key=lambda n: (-score_M[n], n))[:count]:
        path = {node}
        while parent_M[node]:
            node = parent_M[node]
            path.add(node)
        if len(kept | path) > num_nodes:
            break
        kept |= path
    return sorted(kept)


@pytest.mark.parametrize(
    ("M", "depth", "count", "num_nodes"),
    [(2, 1, 1, 4), (9, 1, 4, 6), (30, 4, 1, 12), (30, 4, 9, 12), (30, 4, 9, 31), (30, 5, 99, 7), (30, 5, 99, 40)],
    ids=["one_candidate", "no_depth", "one_best", "cut", "room_for_all", "more_than_there_are", "everything"],
)
def test_the_best_and_their_ancestors_stay(M: int, depth: int, count: int, num_nodes: int) -> None:
    parent_BM, score_BM = random_tree(6, M, depth)
    tree = prune_tree_reference(parent_BM, score_BM, depth, count, num_nodes)
    assert tree.node_BN.shape == tree.parent_BN.shape == (6, num_nodes)
    for b in range(6):
        parents = parent_BM[b].tolist()
        kept = literal(parents, score_BM[b].tolist(), count, num_nodes)
        padding = [-1] * (num_nodes - len(kept))
        assert int(tree.num_nodes_B[b]) == len(kept)
        assert tree.node_BN[b].tolist() == kept + padding
        assert tree.parent_BN[b].tolist() == [-1, *(kept.index(parents[n]) for n in kept[1:]), *padding]


@pytest.mark.parametrize("num_nodes", [9, 40], ids=["cut", "room_for_all"])
def test_more_that_is_asked_for_contains_less(num_nodes: int) -> None:
    parent_BM, score_BM = random_tree(4, 40, 4, seed=1)
    kept = [prune_tree_reference(parent_BM, score_BM, 4, count, num_nodes).node_BN for count in (1, 3, 10, 39)]
    for b in range(4):
        nodes = [set(node_BN[b].tolist()) - {-1} for node_BN in kept]
        assert all(fewer <= more for fewer, more in itertools.pairwise(nodes))


def test_of_equal_scores_the_first_is_taken() -> None:
    tree = prune_tree_reference(torch.tensor([[0, 0, 1, 1, 0]]), torch.zeros(1, 5), 2, 2, 5)
    assert tree.node_BN.tolist() == [[0, 1, 2, -1, -1]]


def test_nothing_is_possible() -> None:
    tree = prune_tree_reference(torch.tensor([[0, 0, 1]]), torch.full((1, 3), -INF), 2, 2, 4)
    assert tree.node_BN.tolist() == [[0, -1, -1, -1]]
    assert tree.num_nodes_B.tolist() == [1]


def test_path_sums_and_parents_by_hand() -> None:
    # two branches, three steps: entries 1 and 2 are the first candidates, 3 and 4 expand candidates 5 and 2
    parents_BP = torch.tensor([[-1, 0, 1, 5, 2]])
    parent_BM = expansion_parents_reference(parents_BP, topk=2)
    assert parent_BM.tolist() == [[0, 0, 0, 1, 1, 2, 2, 6, 6, 3, 3]]
    sums = path_sums_reference(parent_BM, torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]), depth=3)
    assert sums.tolist() == [[0, 1, 2, 4, 5, 7, 8, 15, 16, 13, 14]]
    assert expansion_parents_reference(torch.empty(1, 0, dtype=torch.int64), topk=3).tolist() == [[0, 0, 0, 0]]


def drawn_expansion(B: int, depth: int, topk: int, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    key_P = torch.randperm(V * V, generator=generator, device=device)[: V * V // 2].sort().values
    values = [torch.randn(n, generator=generator, device=device) for n in (len(key_P), V, V)]
    return *random_expansion(generator, B, depth, topk, V), Correlations(key_P, *values)


def assert_same(out: SlimPosterior, expected: SlimPosterior) -> None:
    for name, ours, theirs in zip(
        ("tokens", "num_nodes", *DraftTree._fields),
        (out.tokens_BN, out.num_nodes_B, *out.links),
        (expected.tokens_BN, expected.num_nodes_B, *expected.links),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs), name


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("B", "depth", "topk", "count", "num_nodes"),
    [(1, 1, 1, 1, 2), (3, 1, 5, 3, 4), (2, 4, 3, 1, 9), (2, 4, 3, 9, 10), (2, 3, 4, 64, 40), (1, 6, 2, 5, 64),
     (2, 5, 1, 9, 6)],
    ids=["one", "no_depth", "one_best", "cut", "everything", "deep", "a_chain"],
)  # fmt: skip
@pytest.mark.parametrize("bonus", [0.0, 0.7])
def test_kernel_is_the_reference(
    B: int, depth: int, topk: int, count: int, num_nodes: int, bonus: float, device: torch.device
) -> None:
    inputs = drawn_expansion(B, depth, topk, device)
    arguments = (bonus, topk, depth, count, num_nodes)
    assert_same(tree_prune_kernel(*inputs, *arguments), tree_prune_reference(*inputs, *arguments))


def test_kernel_takes_the_first_of_equal_scores(device: torch.device) -> None:
    root_B, expansion, _ = drawn_expansion(3, 3, 4, device)
    p_BC = (2 * expansion.p_BC).round() / 8 + 0.125  # a few different values
    arguments = (root_B, expansion._replace(p_BC=p_BC), Correlations.none(V, device), 0.0, 4, 3)
    assert len(p_BC.unique()) < 5
    for count, num_nodes in ((3, 5), (11, 30)):
        expected = tree_prune_reference(*arguments, count, num_nodes)
        assert_same(tree_prune_kernel(*arguments, count, num_nodes), expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", [-INF, INF, float("nan")])
def test_impossible_candidates_are_never_taken(fault: float, device: torch.device) -> None:
    """A pair without a finite r takes everything below it out too; so does a probability, of its own candidate."""
    root_B, expansion, correlations = drawn_expansion(4, 3, 3, device, seed=1)
    correlations.log_r_P[::5] = fault
    expansion.p_BC[1, 4], expansion.p_BC[2] = 0.0 if fault == -INF else fault, float("nan")
    arguments = (root_B, expansion, correlations, 0.0, 3, 3, 21, 22)
    expected = tree_prune_reference(*arguments)
    assert expected.num_nodes_B[2] == 1
    assert all(1 < n < 22 for n in expected.num_nodes_B[[1, 3]].tolist())
    assert_same(tree_prune_kernel(*arguments), expected)


def test_operator_and_dispatch(device: torch.device) -> None:
    inputs = drawn_expansion(2, 3, 3, device)
    root_B, expansion, correlations = inputs
    torch.library.opcheck(_tree_prune, (root_B, *expansion, *correlations, 0.5, 3, 3, 6, 9))
    arguments = (0.5, 3, 3, 6, 9)
    assert_same(tree_prune(*inputs, *arguments), tree_prune_reference(*inputs, *arguments))
    strided = Expansion(*(t.T.contiguous().T for t in expansion))  # as slices of what a graph wrote are
    assert_same(tree_prune(root_B, strided, correlations, *arguments), tree_prune_reference(*inputs, *arguments))


def test_roots_may_lie_apart(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one column of what a graph wrote; the kernel is asked also where there is no GPU."""
    monkeypatch.setattr("rayspec_kernels.tree_prune.uses_kernel", lambda *tensors: True)
    root_B, expansion, correlations = drawn_expansion(2, 3, 3, device)
    apart_B = root_B.repeat_interleave(2)[::2]
    expected = tree_prune_reference(root_B, expansion, correlations, 0.5, 3, 3, 6, 9)
    assert_same(tree_prune(apart_B, expansion, correlations, 0.5, 3, 3, 6, 9), expected)


def test_kernel_refuses_sizes_and_layouts(device: torch.device) -> None:
    root_B, expansion, correlations = drawn_expansion(2, 3, 3, device)
    with pytest.raises(ValueError, match="4 steps of top-k 3 have 30 candidates, got 21"):
        tree_prune_kernel(root_B, expansion, correlations, 0.0, 3, 4, 6, 9)
    with pytest.raises(ValueError, match=r"p must be \(2, 21\) of torch.float32 and contiguous"):
        tree_prune_kernel(root_B, expansion._replace(p_BC=expansion.p_BC.double()), correlations, 0.0, 3, 3, 6, 9)
    strided = expansion._replace(tokens_BC=expansion.tokens_BC.T.contiguous().T)
    with pytest.raises(ValueError, match="tokens must be"):
        tree_prune_kernel(root_B, strided, correlations, 0.0, 3, 3, 6, 9)
    with pytest.raises(ValueError, match=r"the kernel takes 1\.\.256 nodes, got 257"):
        tree_prune_kernel(root_B, expansion, correlations, 0.0, 3, 3, 6, 257)
