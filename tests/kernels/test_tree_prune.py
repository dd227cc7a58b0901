"""Pruning of a scored tree against a walk over its nodes."""

import itertools

import pytest
import torch
from torch import Tensor

from rayspec_kernels.tree_prune.reference import (
    expansion_parents_reference,
    path_sums_reference,
    prune_tree_reference,
)

INF = float("inf")


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
