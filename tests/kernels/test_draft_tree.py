"""Draft trees: a hand-made example, the invariants of docs/methods.md, and brute force on random trees."""

import pytest
import torch

from rayspec_kernels.common.draft_tree import (
    DraftTree,
    build_chain_reference,
    build_tree_reference,
    full_mask_reference,
    link_tree_reference,
)


def random_draft(seed: int, topk: int, steps: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parents [1, P], selected [1, M]) of a draft loop with random scores, numbered as EAGLE-2 numbers them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(topk, generator=generator)  # candidates of step 0
    all_scores, beam = [scores], torch.arange(topk)
    parents = [torch.tensor([-1]), torch.arange(topk)]
    for step in range(1, steps):
        candidates = scores[:, None] * torch.rand(topk, topk, generator=generator)
        all_scores.append(candidates.flatten())
        scores, picked = candidates.flatten().topk(topk)
        beam = picked + topk + topk * topk * (step - 1)
        parents.append(beam)
    selected = torch.cat(all_scores).topk(nodes - 1).indices.sort().values
    parent_list = torch.cat(parents[:-1]) if steps > 1 else torch.empty(0, dtype=torch.long)
    return parent_list[None], selected[None]


def ancestors(tree: DraftTree, node: int) -> set[int]:
    """Brute force over the links: all nodes on the way from the root to `node`."""

    def walk(here: int, path: set[int]) -> set[int] | None:
        if here == node:
            return path | {here}
        child = int(tree.first_child_BN[0, here])
        while child != -1:
            found = walk(child, path | {here})
            if found is not None:
                return found
            child = int(tree.next_sibling_BN[0, child])
        return None

    found = walk(0, set())
    assert found is not None, f"node {node} is not linked"
    return found


def test_hand_made_tree() -> None:
    # top-k 2, two steps: candidates 0, 1 under the root; 2, 3 under beam entry 1 (= 0); 4, 5 under entry 2 (= 1)
    parents, selected = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2, 5]])
    tree = build_tree_reference(parents, selected, topk=2)
    assert tree.depth_BN.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.first_child_BN.tolist() == [[1, 3, 4, -1, -1]]
    assert tree.next_sibling_BN.tolist() == [[-1, 2, -1, -1, -1]]
    assert tree.mask_BNN[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"),
    [(2, 1, 3), (4, 3, 8), (8, 5, 32), (3, 4, 2)],
    ids=["one_step", "demo", "wide", "single_draft"],
)
def test_masks_follow_the_links(topk: int, steps: int, nodes: int) -> None:
    for seed in range(5):
        parents, selected = random_draft(seed, topk, steps, nodes)
        tree = build_tree_reference(parents, selected, topk)
        assert torch.equal(tree.mask_BNN[0].sum(dim=1), tree.depth_BN[0] + 1)  # ancestors and itself
        assert not tree.mask_BNN[0].triu(1).any()  # parents come first
        for node in range(nodes):
            assert set(tree.mask_BNN[0, node].nonzero()[:, 0].tolist()) == ancestors(tree, node)


def test_one_step_is_the_children_of_the_root() -> None:
    tree = build_tree_reference(torch.empty(1, 0, dtype=torch.long), torch.tensor([[0, 1, 2]]), topk=3)
    assert tree.depth_BN.tolist() == [[0, 1, 1, 1]]
    assert tree.first_child_BN.tolist() == [[1, -1, -1, -1]]
    assert tree.next_sibling_BN.tolist() == [[-1, 2, 3, -1]]


def test_topk_one_is_the_chain() -> None:
    parents, selected = torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[0, 1, 2, 3]])
    tree, chain = build_tree_reference(parents, selected, topk=1), build_chain_reference(1, 5, torch.device("cpu"))
    for general, special in zip(tree, chain, strict=True):
        assert torch.equal(general, special)


def test_requests_do_not_mix() -> None:
    drafts = [random_draft(seed, 4, 3, 8) for seed in range(3)]
    batch = build_tree_reference(torch.cat([p for p, _ in drafts]), torch.cat([s for _, s in drafts]), topk=4)
    for row, (parents, selected) in enumerate(drafts):
        for whole, alone in zip(batch, build_tree_reference(parents, selected, topk=4), strict=True):
            assert torch.equal(whole[row], alone[0])


def test_a_candidate_without_its_parent_stays_unlinked() -> None:
    # candidate 2 is a child of candidate 0, which was not selected (equal scores can do that)
    tree = build_tree_reference(torch.tensor([[-1, 0, 1]]), torch.tensor([[1, 2]]), topk=2)
    assert tree.first_child_BN.tolist() == [[1, -1, -1]]
    assert tree.next_sibling_BN.tolist() == [[-1, -1, -1]]


def test_any_tree_is_linked_from_its_parents() -> None:
    """By hand: 1 and 4 under the root, 2 and 3 under 1, 5 under 4; 6 belongs to nothing."""
    tree = link_tree_reference(torch.tensor([[-1, 0, 1, 1, 0, 4, -1]]), 2)
    assert tree.depth_BN[0, :6].tolist() == [0, 1, 2, 2, 1, 2]
    assert tree.first_child_BN.tolist() == [[1, 2, -1, -1, 5, -1, -1]]
    assert tree.next_sibling_BN.tolist() == [[-1, 4, 3, -1, -1, -1, -1]]
    seen = [row.nonzero().squeeze(1).tolist() for row in tree.mask_BNN[0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5], [0, 6]]


@pytest.mark.parametrize("lengths", [[4], [3, 0, 7]], ids=["one", "ragged_with_an_empty_prefix"])
@pytest.mark.parametrize("surplus", [0, 11])
def test_full_masks_lie_one_after_the_other(lengths: list[int], surplus: int) -> None:
    B, N = len(lengths), 5
    mask_BNN = torch.rand(B, N, N, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = [
        torch.cat([torch.ones(N, n, dtype=torch.bool), m], dim=1).flatten()
        for n, m in zip(lengths, mask_BNN, strict=True)
    ]
    flat = torch.cat([*expected, torch.ones(surplus, dtype=torch.bool)])
    out = torch.zeros(len(flat), dtype=torch.bool)
    full_mask_reference(mask_BNN, torch.tensor(lengths), out)
    assert torch.equal(out, flat)
