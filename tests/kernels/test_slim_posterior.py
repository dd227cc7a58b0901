"""List-Viterbi and the tree of its hypotheses against brute force."""

import itertools

import pytest
import torch
from torch import Tensor

from rayspec_kernels.hypotheses.reference import best_hypotheses_reference, hypothesis_tree_reference

Ranks = tuple[int, ...]


def scores(B: int, D: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and pair scores of both signs: a long path may outrank its beginning."""
    generator = torch.Generator().manual_seed(seed)
    unary = torch.randn(B, D, k, generator=generator, dtype=torch.float64).log_softmax(dim=-1)
    return unary, 2 * torch.randn(B, D - 1, k, k, generator=generator, dtype=torch.float64)


def enumerate_all(unary_Dk: Tensor, pair_Ekk: Tensor, bonus: float) -> dict[Ranks, float]:
    D, k = unary_Dk.shape
    found = {}
    for length in range(1, D + 1):
        for path in itertools.product(range(k), repeat=length):
            score = sum(float(unary_Dk[d, r]) + bonus for d, r in enumerate(path))
            score += sum(float(pair_Ekk[d, s, t]) for d, (s, t) in enumerate(itertools.pairwise(path)))
            found[path] = score
    return found


def as_path(ranks_D: Tensor) -> Ranks:
    ranks = ranks_D.tolist()
    length = ranks.index(-1) if -1 in ranks else len(ranks)
    assert all(r == -1 for r in ranks[length:])
    return tuple(ranks[:length])


@pytest.mark.parametrize(
    ("B", "D", "k", "count"), [(1, 1, 4, 2), (3, 3, 3, 7), (2, 4, 2, 30), (2, 2, 5, 100)],
    ids=["one_position", "some", "all_but_none", "more_than_there_are"],
)  # fmt: skip
@pytest.mark.parametrize("bonus", [0.0, 0.7])
def test_the_best_are_those_of_brute_force(B: int, D: int, k: int, count: int, bonus: float) -> None:
    unary, pair = scores(B, D, k)
    found = best_hypotheses_reference(unary, pair, bonus, count)
    for b in range(B):
        everything = enumerate_all(unary[b], pair[b], bonus)
        expected = sorted(everything, key=lambda path: -everything[path])[:count]
        assert [as_path(ranks) for ranks in found.ranks_BKD[b]] == expected
        torch.testing.assert_close(
            found.scores_BK[b], torch.tensor([everything[path] for path in expected], dtype=torch.float64)
        )


def test_a_plain_beam_would_not_do() -> None:
    """The best whole path begins with the worst candidate."""
    unary = torch.tensor([[[0.0, -1.0, -9.0], [-5.0, -5.0, -5.0]]])
    pair = torch.zeros(1, 1, 3, 3)
    pair[0, 0, 2, 1] = 20.0
    found = best_hypotheses_reference(unary, pair, 0.0, 1)
    assert as_path(found.ranks_BKD[0, 0]) == (2, 1)


def test_impossible_paths_are_no_hypotheses() -> None:
    unary, pair = scores(2, 3, 2)
    pair[:] = float("-inf")
    unary[1, 0, 0] = float("-inf")
    found = best_hypotheses_reference(unary, pair, 0.0, 6)
    assert [as_path(r) for r in found.ranks_BKD[0] if as_path(r)] in ([(0,), (1,)], [(1,), (0,)])
    assert [as_path(r) for r in found.ranks_BKD[1] if as_path(r)] == [(1,)]


def literal_tree(hypotheses: list[Ranks], num_nodes: int) -> list[Ranks]:
    """Nodes but the root, sorted."""
    nodes: set[Ranks] = set()
    for path in hypotheses:
        added = nodes | {path[: i + 1] for i in range(len(path))}
        if len(added) >= num_nodes:
            break
        nodes = added
    return sorted(nodes, key=lambda path: (len(path), path))


@pytest.mark.parametrize("num_nodes", [2, 4, 9, 64], ids=["one_node", "few", "some", "all"])
@pytest.mark.parametrize(("D", "k"), [(1, 3), (3, 3), (4, 2)])
def test_the_tree_is_that_of_the_hypotheses_and_their_beginnings(D: int, k: int, num_nodes: int) -> None:
    unary, pair = scores(5, D, k, seed=1)
    found = best_hypotheses_reference(unary, pair, 0.0, 11)
    tree = hypothesis_tree_reference(found.ranks_BKD, k, num_nodes)
    for b in range(5):
        expected: list[Ranks] = [(), *literal_tree([as_path(r) for r in found.ranks_BKD[b]], num_nodes)]
        n = int(tree.num_nodes_B[b])
        assert n == len(expected)
        for i, path in enumerate(expected):
            assert int(tree.depth_BN[b, i]) == len(path)
            assert int(tree.parent_BN[b, i]) == (expected.index(path[:-1]) if path else -1)
            assert int(tree.rank_BN[b, i]) == (path[-1] if path else 0)
        assert tree.parent_BN[b, n:].tolist() == [-1] * (num_nodes - n)
        assert tree.depth_BN[b, n:].tolist() == tree.rank_BN[b, n:].tolist() == [0] * (num_nodes - n)


def test_by_hand() -> None:
    """Two hypotheses, the second of which shares the first token with the first and is longer than the tree allows."""
    ranks = torch.tensor([[[1, -1, -1], [1, 0, 2], [0, -1, -1]]])
    tree = hypothesis_tree_reference(ranks, 3, 8)
    assert tree.num_nodes_B.tolist() == [5]
    assert tree.parent_BN[0, :5].tolist() == [-1, 0, 0, 2, 3]
    assert tree.rank_BN[0, :5].tolist() == [0, 0, 1, 0, 2]
    smaller = hypothesis_tree_reference(ranks, 3, 3)  # the second does not fit, and so the third is not taken either
    assert (smaller.num_nodes_B.tolist(), smaller.parent_BN.tolist()) == ([2], [[-1, 0, -1]])


def test_with_r_of_one_the_best_are_closed() -> None:
    """Products of probabilities never grow: every beginning of a kept path is kept by its own score (METHODS 12)."""
    unary, pair = scores(4, 3, 4, seed=2)
    found = best_hypotheses_reference(unary, torch.zeros_like(pair), 0.0, 20)
    for b in range(4):
        kept = {as_path(ranks) for ranks in found.ranks_BKD[b]}
        assert all(path[:-1] in kept for path in kept if len(path) > 1)


def test_more_hypotheses_are_a_larger_tree() -> None:
    unary, pair = scores(3, 3, 4, seed=3)
    nodes: list[set[Ranks]] = []
    for count in (1, 5, 20, 84):
        ranks = best_hypotheses_reference(unary, pair, 0.0, count).ranks_BKD[0]
        nodes.append(set(literal_tree([as_path(r) for r in ranks], 1000)))
    assert nodes[0] < nodes[1] < nodes[2] < nodes[3]
    assert len(nodes[3]) == 4 + 16 + 64
