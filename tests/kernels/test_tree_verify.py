"""Verification: greedy walks by hand, and the sampled rules against the target's distribution by chi-square."""

from collections.abc import Callable

import pytest
import torch
from chi_square import p_value
from volume import volume

from rayspec_kernels.common.draft_tree import build_chain_reference
from rayspec_kernels.cpu.tree_verify import (
    Accepted,
    verify_chain_reference,
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


SAMPLES, V = volume(100_000, 20_000), 12
DISTRIBUTION_VV = torch.softmax(
    1.2 * torch.randn(V, V, generator=torch.Generator().manual_seed(1)), dim=-1
)  # by last token
DRAFTER_VV = torch.softmax(
    DISTRIBUTION_VV.log() + 0.8 * torch.randn(V, V, generator=torch.Generator().manual_seed(2)), dim=-1
)
ROOT = 5

Rule = Callable[[torch.Tensor, torch.Generator], tuple[torch.Tensor, Accepted]]


def emitted_pairs(rule: Rule, seed: int, samples: int = SAMPLES) -> torch.Tensor:
    """Counts [V, V] of the first two tokens after ROOT: two rounds of drafting and verification where one gave one."""
    generator = torch.Generator().manual_seed(seed)
    first = emitted(*rule(torch.full((samples,), ROOT), generator))
    short = [i for i, tokens in enumerate(first) if len(tokens) == 1]
    assert 0.05 < len(short) / samples < 0.95, "both ends of a round were to be seen"
    second = emitted(*rule(torch.tensor([first[i][0] for i in short]), generator))
    for i, tokens in zip(short, second, strict=True):
        first[i] += tokens
    return count_pairs(torch.tensor([tokens[:2] for tokens in first]))


def emitted(tokens_BN: torch.Tensor, accepted: Accepted) -> list[list[int]]:
    return [
        [tokens[node] for node in path[1 : 1 + count]] + [bonus]
        for tokens, path, count, bonus in zip(tokens_BN.tolist(), *(x.tolist() for x in accepted), strict=True)
    ]


def count_pairs(pairs_S2: torch.Tensor) -> torch.Tensor:
    return torch.bincount(pairs_S2[:, 0] * V + pairs_S2[:, 1], minlength=V * V).view(V, V)


def p_values(counts_VV: torch.Tensor) -> tuple[float, float]:
    """Of the first token, and of the first two together."""
    first_V = DISTRIBUTION_VV[ROOT]
    return p_value((counts_VV.sum(dim=1), first_V)), p_value((counts_VV, first_V[:, None] * DISTRIBUTION_VV))


def coins(shape: torch.Size, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(shape, generator=generator), torch.rand(shape[0], generator=generator)


def one_hot_chain(last_B: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, Accepted]:
    """Rule 3: the drafter's argmax, twice."""
    one_B = DRAFTER_VV.argmax(dim=-1)[last_B]
    tokens_BN = torch.stack([last_B, one_B, DRAFTER_VV.argmax(dim=-1)[one_B]], dim=1)
    links = [x.expand(len(last_B), -1) for x in build_chain_reference(1, 3, last_B.device)[2:]]
    return tokens_BN, verify_sampled_reference(
        tokens_BN, DISTRIBUTION_VV[tokens_BN], *links, *coins(tokens_BN.shape, generator), 3
    )


TREE = {"first_child": [1, 4, -1, -1, -1, -1], "next_sibling": [-1, 2, 3, -1, 5, -1]}


def top_k_tree(last_B: torch.Tensor, generator: torch.Generator, repeat: bool = False) -> tuple[torch.Tensor, Accepted]:
    """Rule 4: the three best tokens (the third may repeat the first), and the two best after the best."""
    children_B3 = DRAFTER_VV[last_B].topk(3).indices
    if repeat:
        children_B3[:, 2] = children_B3[:, 0]
    tokens_BN = torch.cat([last_B[:, None], children_B3, DRAFTER_VV[children_B3[:, 0]].topk(2).indices], dim=1)
    links = [torch.tensor([x]).expand(len(last_B), -1) for x in TREE.values()]
    return tokens_BN, verify_sampled_reference(
        tokens_BN, DISTRIBUTION_VV[tokens_BN], *links, *coins(tokens_BN.shape, generator), 3
    )


def top_k_tree_with_a_repeated_sibling(
    last_B: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, Accepted]:
    return top_k_tree(last_B, generator, repeat=True)


def drawn_chain(
    last_B: torch.Tensor, generator: torch.Generator, drawn_VV: torch.Tensor, claimed_VV: torch.Tensor
) -> tuple[torch.Tensor, Accepted]:
    """Rule 2: two drafts drawn from one distribution and verified as if drawn from another."""
    tokens = [last_B]
    for _ in range(2):
        tokens.append(torch.multinomial(drawn_VV[tokens[-1]], 1, generator=generator).squeeze(1))
    tokens_BN = torch.stack(tokens, dim=1)
    return tokens_BN, verify_chain_reference(
        tokens_BN, DISTRIBUTION_VV[tokens_BN], claimed_VV[tokens_BN[:, :2]], *coins(tokens_BN.shape, generator)
    )


def shortlist(p_VV: torch.Tensor) -> torch.Tensor:
    """The distribution over a fixed third of the vocabulary, renormalised: what a truncated head draws from."""
    kept = torch.zeros(V).index_fill(0, torch.tensor([0, 3, 4, 10]), 1.0)
    return p_VV * kept / (p_VV * kept).sum(dim=-1, keepdim=True)


def sampled_chain(last_B: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, Accepted]:
    return drawn_chain(last_B, generator, DRAFTER_VV, DRAFTER_VV)


def shortlist_chain(last_B: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, Accepted]:
    return drawn_chain(last_B, generator, shortlist(DRAFTER_VV), shortlist(DRAFTER_VV))


def shortlist_claiming_the_vocabulary(
    last_B: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, Accepted]:
    return drawn_chain(last_B, generator, shortlist(DRAFTER_VV), DRAFTER_VV)


@pytest.mark.parametrize(
    "rule", [sampled_chain, shortlist_chain, one_hot_chain, top_k_tree, top_k_tree_with_a_repeated_sibling]
)
def test_emitted_tokens_follow_the_target_distribution(rule: Rule) -> None:
    first, pair = p_values(emitted_pairs(rule, seed=3))
    assert first > 1e-3
    assert pair > 1e-3


def test_a_distribution_that_was_not_drawn_from_is_caught() -> None:
    """Negative control: draw from a shortlist, verify with the softmax over the vocabulary."""
    first, pair = p_values(emitted_pairs(shortlist_claiming_the_vocabulary, seed=3))
    assert first < 1e-6
    assert pair < 1e-6


def test_a_wrong_residual_is_caught() -> None:
    """Negative control: a final draw from the untouched target distribution, as if nothing had been rejected."""
    generator = torch.Generator().manual_seed(3)
    draft_S = DRAFTER_VV.argmax(dim=-1)[torch.full((SAMPLES,), ROOT)]
    accepted_S = torch.rand(SAMPLES, generator=generator) < DISTRIBUTION_VV[ROOT, draft_S]
    redrawn_S = torch.multinomial(DISTRIBUTION_VV[ROOT], SAMPLES, replacement=True, generator=generator)
    counts_V = torch.bincount(torch.where(accepted_S, draft_S, redrawn_S), minlength=V)
    assert p_value((counts_V, DISTRIBUTION_VV[ROOT])) < 1e-6


def test_certain_target_accepts_every_draft() -> None:
    tokens, certain = torch.tensor([[0, 1, 2]]), torch.eye(3)[[1, 2, 0]][None]
    largest, final = torch.full((1, 3), 1 - 2**-24), torch.tensor([1 - 2**-24])
    links = build_chain_reference(1, 3, torch.device("cpu"))[2:]
    for result in (
        verify_sampled_reference(tokens, certain, *links, largest, final, 3),
        verify_chain_reference(tokens, certain, certain[:, :2], largest, final),
        verify_chain_reference(tokens, certain, torch.full((1, 2, 3), 1 / 3), largest, final),
    ):
        assert result.path_BD.tolist() == [[0, 1, 2]]
        assert result.bonus_B.tolist() == [0]


def test_greedy_target_rejects_a_draft_that_was_not_drawn_from_q() -> None:
    """SGLang proposes the argmax of a greedy request beside a q that is no one-hot: the target's token comes out."""
    certain, q = torch.eye(3)[[1, 2, 0]][None], torch.tensor([[[0.5, 0.4, 0.1], [0.2, 0.1, 0.7]]])
    for coin in (0.0, 0.5, 1 - 2**-24):
        coins_13 = torch.full((1, 3), coin)
        wrong = verify_chain_reference(torch.tensor([[0, 2, 2]]), certain, q, coins_13, coins_13[0, :1])
        assert (wrong.num_drafts_B.tolist(), wrong.bonus_B.tolist()) == ([0], [1])


def test_a_residual_without_mass_is_drawn_from_the_target_distribution() -> None:
    """Rounding can reject where p equals q, or where the children hold all of the mass."""
    largest = torch.full((1, 2), 1 - 2**-24)
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    result = verify_chain_reference(torch.tensor([[0, 0]]), p, p[:, :1] * (1 + 2**-22), largest, largest[0, :1])
    assert (result.num_drafts_B.tolist(), result.bonus_B.tolist()) == ([0], [1])
    short = torch.tensor([[[1 - 2**-24, 0.0], [1.0, 0.0]]])
    result = verify_sampled_reference(
        torch.tensor([[0, 0]]), short, torch.tensor([[1, -1]]), torch.tensor([[-1, -1]]), largest, largest[0, :1], 2
    )
    assert (result.num_drafts_B.tolist(), result.bonus_B.tolist()) == ([0], [0])


def test_a_proposal_without_probability_is_rejected() -> None:
    q = torch.tensor([[[0.0, 1.0, 0.0]]])
    p = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]])
    coins_12 = torch.tensor([[0.0, 0.0]])
    result = verify_chain_reference(torch.tensor([[1, 0]]), p, q, coins_12, torch.tensor([0.99]))
    assert (result.num_drafts_B.tolist(), result.bonus_B.tolist()) == ([0], [2])
