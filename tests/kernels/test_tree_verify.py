"""Verification: greedy walks by hand, and the sampled rule against the target's law by chi-square."""

import pytest
import torch
from scipy.stats import chisquare

from rayspec_kernels.tree_build.reference import build_chain_reference
from rayspec_kernels.tree_verify.reference import (
    keep_top_k_reference,
    keep_top_p_reference,
    verify_greedy_reference,
    verify_sampled_reference,
)

CHAIN = build_chain_reference(1, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("target", "accepted", "bonus"),
    [([11, 12, 13, 14], 3, 14), ([11, 12, 99, 14], 2, 99), ([99, 12, 13, 14], 0, 99), ([11, 99, 13, 14], 1, 99)],
    ids=["all_match", "last_differs", "none", "match_after_mismatch"],
)
def test_greedy_chain(target: list[int], accepted: int, bonus: int) -> None:
    tokens = torch.tensor([[10, 11, 12, 13]])
    result = verify_greedy_reference(tokens, torch.tensor([target]), CHAIN.first_child_BN, CHAIN.next_sibling_BN, 4)
    assert result.num_drafts_B.tolist() == [accepted]
    assert result.bonus_B.tolist() == [bonus]
    assert result.path_BD.tolist() == [list(range(accepted + 1)) + [-1] * (3 - accepted)]


def test_greedy_tree_takes_the_second_sibling_then_its_child() -> None:
    first_child, next_sibling = torch.tensor([[1, -1, 3, -1]]), torch.tensor([[-1, 2, -1, -1]])
    tokens, target = torch.tensor([[7, 20, 21, 22]]), torch.tensor([[21, 0, 22, 5]])
    result = verify_greedy_reference(tokens, target, first_child, next_sibling, 3)
    assert result.path_BD.tolist() == [[0, 2, 3]]
    assert result.bonus_B.tolist() == [5]


def test_greedy_batch_is_ragged() -> None:
    tokens = torch.tensor([[10, 11, 12, 13]] * 3)
    target = torch.tensor([[11, 12, 13, 1], [9, 9, 9, 9], [11, 9, 9, 9]])
    tree = build_chain_reference(3, 4, torch.device("cpu"))
    result = verify_greedy_reference(tokens, target, tree.first_child_BN, tree.next_sibling_BN, 4)
    assert result.num_drafts_B.tolist() == [3, 0, 1]


SAMPLES, V = 40_000, 6
FIRST_CHILD, NEXT_SIBLING = torch.tensor([[1, -1, 3, -1]]), torch.tensor([[-1, 2, -1, -1]])


def emitted_pairs(tokens: list[int], p_NV: torch.Tensor, seed: int) -> torch.Tensor:
    """Counts [V, V + 1] of (first emitted token, second one or V where only one was emitted)."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.tensor([tokens]).expand(SAMPLES, -1)
    result = verify_sampled_reference(
        batch,
        p_NV[None].expand(SAMPLES, -1, -1),
        FIRST_CHILD.expand(SAMPLES, -1),
        NEXT_SIBLING.expand(SAMPLES, -1),
        torch.rand(SAMPLES, len(tokens), generator=generator),
        torch.rand(SAMPLES, generator=generator),
        3,
    )
    counts = torch.zeros(V, V + 1)
    for path, bonus in zip(result.path_BD.tolist(), result.bonus_B.tolist(), strict=True):
        emitted = [tokens[node] for node in path[1:] if node >= 0] + [bonus]
        counts[emitted[0], emitted[1] if len(emitted) > 1 else V] += 1
    return counts


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3], [0, 2, 2, 3]], ids=["distinct_siblings", "repeated_sibling"])
def test_sampled_tree_follows_the_target_law(tokens: list[int]) -> None:
    p_NV = torch.softmax(torch.randn(4, V, generator=torch.Generator().manual_seed(1)), dim=-1)
    counts = emitted_pairs(tokens, p_NV, seed=2)
    assert chisquare(counts.sum(dim=1), (p_NV[0] * SAMPLES).double()).pvalue > 1e-3
    # the second token after the second sibling (token 2, node 2) follows p at that node
    if tokens[1] != 2:
        after = counts[2, :V]
        assert chisquare(after, (p_NV[2] * after.sum()).double()).pvalue > 1e-3


def test_a_wrong_residual_is_caught() -> None:
    """Negative control: a final draw from the untouched target law, as if nothing had been rejected."""
    p_NV = torch.softmax(torch.randn(4, V, generator=torch.Generator().manual_seed(1)), dim=-1)
    counts = emitted_pairs([0, 1, 2, 3], p_NV, seed=2).sum(dim=1)
    drafted = counts[[1, 2]].sum()
    wrong = torch.distributions.Multinomial(int(SAMPLES - drafted), p_NV[0])
    torch.manual_seed(3)
    biased = wrong.sample()
    biased[[1, 2]] += counts[[1, 2]]
    assert chisquare(biased, (p_NV[0] * SAMPLES).double()).pvalue < 1e-6


def test_certain_target_accepts_every_draft() -> None:
    p_NV = torch.zeros(4, V)
    p_NV[torch.arange(4), torch.tensor([2, 0, 3, 5])] = 1.0
    counts = emitted_pairs([0, 1, 2, 3], p_NV, seed=4)
    assert counts[2, 3] == SAMPLES


def test_top_k_and_top_p() -> None:
    p_TV = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    kept = keep_top_k_reference(p_TV, torch.tensor([2, 4]))
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[1], p_TV[1])
    kept = keep_top_p_reference(p_TV, torch.tensor([0.7, 1.0]))
    torch.testing.assert_close(kept[0], torch.tensor([0.625, 0.375, 0.0, 0.0]))
    torch.testing.assert_close(kept[1], p_TV[1])
