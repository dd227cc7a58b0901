"""The distribution of drawn siblings, summed over everything that could have been drawn.

V = vocabulary, k = children of a node.
"""

import itertools

import pytest
import torch
from torch import Tensor

from rayspec_kernels.cpu.sibling_distribution import Siblings, sibling_distribution_reference

V = 5
P_V = torch.tensor([0.35, 0.05, 0.25, 0.3, 0.05])
DISTRIBUTIONS = {
    "near": torch.tensor([0.3, 0.1, 0.3, 0.2, 0.1]),
    "far": torch.tensor([0.02, 0.55, 0.03, 0.1, 0.3]),
    "shortlist": torch.tensor([0.6, 0.0, 0.4, 0.0, 0.0]),  # fewer tokens than a node has children
    "one_token": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
    "equal": P_V,
}


def siblings_of_root(k: int) -> Siblings:
    return Siblings(torch.tensor([0]), torch.arange(1, k + 1)[None], torch.tensor([0]))


def draws(q_V: Tensor, k: int) -> list[tuple[tuple[int, ...], float]]:
    """All ordered draws without replacement with their chance; beyond the support the lowest ids."""
    found = []
    for ids in itertools.permutations(range(V), k):
        chance, left_V = 1.0, q_V.double().clone()
        for y in ids:
            if float(left_V.sum()) > 0:
                chance *= float(left_V[y] / left_V.sum())
            else:
                chance *= float(y == min(set(range(V)) - set(ids[: ids.index(y)])))
            left_V[y] = 0
        if chance > 0:
            found.append((ids, chance))
    assert sum(chance for _, chance in found) == pytest.approx(1)
    return found


def distribution_of_next_token(p_V: Tensor, q_V: Tensor, verified_V: Tensor, k: int) -> Tensor:
    """Where k children are drawn from q and verified as if drawn from `verified_V`."""
    total_V = torch.zeros(V, dtype=torch.float64)
    for ids, chance in draws(q_V, k):
        tokens_BN = torch.tensor([[0, *ids]])
        target_BNV = p_V.expand(1, k + 1, V)
        distribution_BNV = sibling_distribution_reference(
            target_BNV, verified_V.view(1, 1, V), tokens_BN, siblings_of_root(k)
        )
        assert bool((distribution_BNV >= 0).all())
        torch.testing.assert_close(distribution_BNV.sum(dim=-1), torch.ones(1, k + 1))
        torch.testing.assert_close(
            distribution_BNV[:, 1:], target_BNV[:, 1:], rtol=0, atol=0
        )  # leaves have no children
        total_V += chance * distribution_BNV[0, 0].double()
    return total_V


@pytest.mark.parametrize("k", [1, 2, 3, V])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_next_token_follows_the_target(name: str, k: int) -> None:
    torch.testing.assert_close(
        distribution_of_next_token(P_V, DISTRIBUTIONS[name], DISTRIBUTIONS[name], k), P_V.double(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("p", [(1.0, 0.0, 0.0, 0.0, 0.0), (0.5, 0.3, 0.2, 0.0, 0.0)])
def test_a_child_that_q_cannot_draw_takes_nothing_from_it(p: tuple[float, ...]) -> None:
    """As the likeliest tokens of a greedy request are children of a distribution that has one token."""
    p_V, q_V = torch.tensor(p), torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    distribution_BNV = sibling_distribution_reference(
        p_V.expand(1, 4, V), q_V.view(1, 1, V), torch.tensor([[0, 1, 0, 2]]), siblings_of_root(3)
    )
    torch.testing.assert_close(distribution_BNV[0, 0], p_V)


def test_a_distribution_that_was_not_drawn_from_is_seen() -> None:
    """A negative control: drawn from a shortlist, verified with the distribution over the vocabulary."""
    wrong_V = distribution_of_next_token(P_V, DISTRIBUTIONS["shortlist"], DISTRIBUTIONS["near"], 2)
    assert float((wrong_V - P_V).abs().sum()) > 0.05


def test_one_child_is_the_rule_of_a_chain() -> None:
    q_V = DISTRIBUTIONS["near"]
    for y in range(V):
        distribution_BNV = sibling_distribution_reference(
            P_V.expand(1, 2, V), q_V.view(1, 1, V), torch.tensor([[0, y]]), siblings_of_root(1)
        )
        accepted = min(1.0, float(P_V[y] / q_V[y]))
        rest_V = (P_V - q_V).clamp(min=0)
        rest_V[y] = 0
        expected_V = (1 - accepted) * rest_V / rest_V.sum()
        expected_V[y] = accepted
        torch.testing.assert_close(distribution_BNV[0, 0], expected_V)


def test_drafts_of_the_target_itself_are_accepted() -> None:
    distribution_BNV = sibling_distribution_reference(
        P_V.expand(1, 3, V), P_V.view(1, 1, V), torch.tensor([[0, 1, 3]]), siblings_of_root(2)
    )
    assert float(distribution_BNV[0, 0, 1]) == 1


def test_accepts_more_than_the_best_tokens_where_the_distributions_are_near() -> None:
    q_V = DISTRIBUTIONS["near"]
    drawn = sum(
        chance
        * float(
            sibling_distribution_reference(
                P_V.expand(1, 3, V), q_V.view(1, 1, V), torch.tensor([[0, *ids]]), siblings_of_root(2)
            )[0, 0, list(ids)].sum()
        )
        for ids, chance in draws(q_V, 2)
    )
    best = float(P_V[q_V.topk(2).indices].sum())
    assert drawn > 0.9 > 0.61 > best


def test_each_node_has_its_own_children_and_distribution() -> None:
    """Two requests, a node with two children and one of these with one; nodes are not touched by others."""
    tokens_BN = torch.tensor([[4, 0, 2, 1], [3, 2, 1, 0]])
    siblings = Siblings(torch.tensor([0, 2]), torch.tensor([[1, 2], [3, -1]]), torch.tensor([1, 0]))
    target_BNV = torch.rand(2, 4, V, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    draft_BRV = torch.stack([DISTRIBUTIONS["near"], DISTRIBUTIONS["far"]]).expand(2, 2, V)
    distribution_BNV = sibling_distribution_reference(target_BNV, draft_BRV, tokens_BN, siblings)
    assert torch.equal(distribution_BNV[:, [1, 3]], target_BNV[:, [1, 3]])
    for b in range(2):
        for parent, children, distribution in ((0, [1, 2], 1), (2, [3], 0)):
            alone = sibling_distribution_reference(
                target_BNV[b : b + 1, [parent, *children]],
                draft_BRV[b : b + 1, [distribution]],
                tokens_BN[b : b + 1, [parent, *children]],
                siblings_of_root(len(children)),
            )
            torch.testing.assert_close(distribution_BNV[b, parent], alone[0, 0])
