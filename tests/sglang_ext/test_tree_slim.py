"""SLiM's correlations and trees against the formulas, Medusa's tree and brute force."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import SPECS, V, seeded
from safetensors.torch import load_file
from test_last_hidden import TARGET, embed, make_drafter, rows
from torch import Tensor

from sglang_ext.drafters.checkpoint import drafter_shapes, load_drafter, save_drafter
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.trees.slim import SlimOptions, SlimProposer, SlimTree
from sglang_ext.trees.static import StaticProposer

CPU = torch.device("cpu")
COUNTS_VV = (seeded(V, V, seed=60) * 6).clamp(min=0).floor().long()  # about half of the pairs were never seen
COUNTS_VV[:, 7] = 0  # a token that never came second
COUNTS_VV[9] = 0  # one that never came first


def csr() -> tuple[Tensor, Tensor, Tensor]:
    indptr = torch.cat([torch.zeros(1), (COUNTS_VV > 0).sum(dim=1).cumsum(0)]).long()
    return indptr, COUNTS_VV.nonzero()[:, 1].int(), COUNTS_VV[COUNTS_VV > 0].int()


def make_tree(**options: Any) -> SlimTree:
    indptr, ids, counts = csr()
    return SlimTree.with_counts(SlimOptions(pairs=len(ids), **options), indptr, ids, counts)


def log_r(tree: SlimTree) -> Tensor:
    """Of all pairs, [V, V]."""
    tokens = torch.arange(V)
    return tree.correlations().of(tokens[:, None], tokens[None, :])


def test_r_times_the_marginals_is_the_joint_distribution() -> None:
    joint_VV = COUNTS_VV.double() / COUNTS_VV.sum()
    product_VV = joint_VV.sum(dim=1)[:, None] * joint_VV.sum(dim=0)
    seen_VV = COUNTS_VV > 0
    found_VV = log_r(make_tree()).double().exp() * product_VV
    torch.testing.assert_close(found_VV[seen_VV], joint_VV[seen_VV], rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"correlation": False}, {"unseen": "zero"}, {"strength": 0.4}], ids=str)
def test_r_is_of_the_types_that_the_kernels_take(options: dict[str, Any]) -> None:
    """Also where a model is being loaded in 16 bits, as SGLang sets torch's default for."""
    tree, before = make_tree(**options), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        pruner = tree.pruner(3, 4, 8, CPU)
    finally:
        torch.set_default_dtype(before)
    for name, (tensor, shape, dtype) in pruner.correlations.layout().items():
        assert (tensor.shape, tensor.dtype) == (shape, dtype), name


def test_pairs_that_were_not_counted() -> None:
    unseen_VV = COUNTS_VV == 0
    assert (log_r(make_tree(unseen="one"))[unseen_VV] == 0).all()
    assert (log_r(make_tree(unseen="zero"))[unseen_VV] == float("-inf")).all()
    added = 0.5
    smoothed_VV = (COUNTS_VV + added).double()
    smoothed_VV /= smoothed_VV.sum()
    expected = smoothed_VV / (smoothed_VV.sum(dim=1)[:, None] * smoothed_VV.sum(dim=0))
    found = log_r(make_tree(unseen="smoothed", smoothing=added))
    torch.testing.assert_close(found.double(), expected.log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unseen", ["one", "zero", "smoothed"])
def test_strength_is_an_exponent_of_r(unseen: str) -> None:
    whole, half = (log_r(make_tree(unseen=unseen, strength=strength)) for strength in (1.0, 0.5))
    torch.testing.assert_close(half, 0.5 * whole)
    assert not torch.equal(half, whole)
    with pytest.raises(ValueError, match=r"strength must be above 0, got 0\.0; correlation: false"):
        make_tree(strength=0.0)


def test_without_correlation_r_is_one() -> None:
    assert (log_r(make_tree(correlation=False)) == 0).all()
    assert (log_r(SlimTree(SlimOptions(correlation=False), V)) == 0).all()


def candidates(drafter: Any, hidden_BH: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, log p) [B, D, k] of each position, by the head itself."""
    proposals = [drafter.lm_head.at(i).propose(drafter.state(i, hidden_BH, None), i, k) for i in range(3)]
    ids_BDk = torch.stack([p.token_ids_Tk for p in proposals], dim=1)
    return ids_BDk, torch.stack([p.probabilities_Tk.log() for p in proposals], dim=1)


@pytest.mark.parametrize("unseen", ["one", "zero", "smoothed"])
@pytest.mark.parametrize("count", [1, 4, 15])
@torch.no_grad()
def test_the_tree_holds_the_best_hypotheses_of_brute_force(count: int, unseen: str) -> None:
    drafter, (hidden_BH, root_B), k = make_drafter("medusa"), rows(4), 4
    tree = make_tree(hypotheses=count, unseen=unseen, length_bonus=0.3)
    draft = tree.fit(3, k, 64, CPU).propose(drafter, hidden_BH, root_B, embed)
    ids_BDk, log_p_BDk = candidates(drafter, hidden_BH, k)
    log_r_VV = log_r(tree).double()
    for b in range(4):
        scores: dict[tuple[int, ...], float] = {}
        for length in (1, 2, 3):
            for path in itertools.product(range(k), repeat=length):
                tokens = [int(root_B[b]), *(int(ids_BDk[b, d, r]) for d, r in enumerate(path))]
                score = sum(float(log_p_BDk[b, d, r]) + 0.3 for d, r in enumerate(path))
                scores[path] = score + sum(float(log_r_VV[x, y]) for x, y in itertools.pairwise(tokens))
        possible = [path for path, score in scores.items() if score > float("-inf")]
        best = sorted(possible, key=lambda path: -scores[path])[:count]
        nodes = sorted({p[: i + 1] for p in best for i in range(len(p))}, key=lambda p: (len(p), p))
        assert draft.num_nodes_B is not None
        assert int(draft.num_nodes_B[b]) == len(nodes) + 1
        expected = [int(root_B[b]), *(int(ids_BDk[b, len(p) - 1, p[-1]]) for p in nodes)]
        assert draft.tokens_BN[b, : len(expected)].tolist() == expected
        for n, path in enumerate(nodes, start=1):
            own = {0, *(nodes.index(path[: i + 1]) + 1 for i in range(len(path)))}
            assert set(draft.links.mask_BNN[b, n].nonzero().squeeze(1).tolist()) == own
        reached = draft.links.first_child_BN[b].tolist() + draft.links.next_sibling_BN[b].tolist()
        assert sorted(n for n in reached if n != -1) == list(range(1, len(expected))), "padding is linked to nothing"


@pytest.mark.parametrize("correlation", [True, False])
@torch.no_grad()
def test_all_hypotheses_are_medusas_tree_token_for_token(correlation: bool) -> None:
    k, everything = 3, [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    drafter, (hidden_BH, root_B) = make_drafter("medusa", SPECS["slimspec"]), rows(3)
    tree = make_tree(hypotheses=len(everything), correlation=correlation)
    slim = tree.fit(3, k, len(everything) + 1, CPU).propose(drafter, hidden_BH, root_B, embed)
    medusa = StaticProposer(everything, CPU).propose(drafter, hidden_BH, root_B, embed)
    assert torch.equal(slim.tokens_BN, medusa.tokens_BN)
    assert all(torch.equal(a, b) for a, b in zip(slim.links, medusa.links, strict=True))


@torch.no_grad()
def test_a_request_has_the_same_tree_in_a_batch_as_alone() -> None:
    drafter, (hidden_BH, root_B) = make_drafter("medusa", SPECS["dynaspec"]), rows(5)
    proposer = make_tree(hypotheses=6).fit(3, 4, 12, CPU)
    together = proposer.propose(drafter, hidden_BH, root_B, embed)
    for b in range(5):
        alone = proposer.propose(drafter, hidden_BH[b : b + 1], root_B[b : b + 1], embed)
        assert torch.equal(alone.tokens_BN[0], together.tokens_BN[b])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone.links, together.links, strict=True))


@torch.no_grad()
def test_correlations_change_the_tree_and_a_small_budget_cuts_it() -> None:
    drafter, (hidden_BH, root_B) = make_drafter("medusa"), rows(3)

    def draft(nodes: int, **options: Any) -> Tensor:
        tree = make_tree(hypotheses=10, **options)
        return tree.fit(3, 5, nodes, CPU).propose(drafter, hidden_BH, root_B, embed).tokens_BN

    assert not torch.equal(draft(40), draft(40, correlation=False))
    assert draft(4).shape == (3, 4)
    with pytest.raises(ValueError, match="raise num_draft_tokens"):
        make_tree().fit(3, 5, 3, CPU)


def test_a_hydra_drafter_cannot_have_such_a_tree() -> None:
    hydra = make_drafter("hydra")
    with pytest.raises(ValueError, match="a drafter of kind hydra, which reads the path"):
        type(hydra)(hydra.config, hydra.lm_head, make_tree())


@pytest.mark.parametrize("counted", [True, False])
def test_round_trip(counted: bool, tmp_path: Path) -> None:
    drafter = make_drafter("medusa", SPECS["slimspec"])
    drafter.draft_tree = make_tree(hypotheses=7) if counted else SlimTree(SlimOptions(correlation=False), V)
    save_drafter(tmp_path / "d", drafter, TARGET)
    loaded, _ = load_drafter(tmp_path / "d")
    assert loaded.draft_tree.options == drafter.draft_tree.options
    assert torch.equal(log_r(loaded.draft_tree), log_r(drafter.draft_tree))


def test_pairs_that_another_drafter_holds_are_read_there(tmp_path: Path) -> None:
    """By who loads the drafter, and by who counts what it costs."""
    drafter = make_drafter("medusa", SPECS["slimspec"])
    drafter.draft_tree = make_tree(hypotheses=7)
    save_drafter(tmp_path / "first", drafter, TARGET)
    drafter.draft_tree = make_tree(hypotheses=3)
    save_drafter(tmp_path / "second", drafter, TARGET, share_with=tmp_path / "first")
    assert not any("bigram" in name for name in load_file(tmp_path / "second" / WEIGHTS))
    for found in (load_drafter(tmp_path / "second")[0], drafter_shapes(tmp_path / "second")):
        assert found.draft_tree.options == drafter.draft_tree.options
        assert torch.equal(log_r(found.draft_tree), log_r(drafter.draft_tree))


FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "pairs": (lambda t: t.update(pairs=3), r"draft_tree\.bigram_ids has shape"),
    "hypotheses": (lambda t: t.update(hypotheses=0), "draft_tree.hypotheses must be at least 1"),
    "type": (lambda t: t.update(hypotheses=2.5), "draft_tree.hypotheses must be a whole number"),
    "unseen": (lambda t: t.update(unseen="two"), "draft_tree.unseen must be one of zero, one, smoothed"),
    "option": (lambda t: t.update(k=3), "unknown key 'draft_tree.k'"),
    "uncounted": (lambda t: t.update(pairs=0), "draft_tree.correlation needs counted pairs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_options_are_refused(fault: str, tmp_path: Path) -> None:
    drafter = make_drafter("medusa")
    drafter.draft_tree = make_tree()
    save_drafter(tmp_path / "d", drafter, TARGET)
    change, message = FAULTS[fault]
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    change(config["draft_tree"])
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "end": (lambda p, i, c: p[-1].add_(1), "must ascend from 0 to"),
    "order": (lambda p, i, c: p[3].fill_(10**6), "must ascend from 0"),
    "columns": (lambda p, i, c: i[:2].copy_(i[:2].flip(0)), "must ascend within each row"),
    "range": (lambda p, i, c: i[-1].fill_(V), "be in 0..52"),
    "counts": (lambda p, i, c: c[5].fill_(0), "bigram_counts must be at least 1"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_counts_are_refused(fault: str) -> None:
    indptr, ids, counts = csr()
    damage, message = TENSOR_FAULTS[fault]
    damage(indptr, ids, counts)
    with pytest.raises(ValueError, match=message):
        SlimTree.with_counts(SlimOptions(pairs=len(ids)), indptr, ids, counts)


def test_a_smaller_tree_of_the_same_candidates_is_part_of_the_larger() -> None:
    """So that more hypotheses never accept less."""
    generator = torch.Generator().manual_seed(0)
    ids_BDk = torch.stack([torch.randperm(V, generator=generator)[:6] for _ in range(12)]).view(4, 3, 6)
    log_p_BDk = torch.randn(4, 3, 6, generator=generator).log_softmax(dim=-1)
    paths: list[list[set[tuple[int, ...]]]] = []
    for count in (1, 3, 9, 27):
        proposer = make_tree(hypotheses=count).fit(3, 6, 128, CPU)
        assert isinstance(proposer, SlimProposer)
        draft = proposer.of_candidates(torch.arange(4), ids_BDk, log_p_BDk.clone())
        assert draft.num_nodes_B is not None
        of_request = []
        for b in range(4):
            used = range(1, int(draft.num_nodes_B[b]))
            seen = [draft.links.mask_BNN[b, n].nonzero().squeeze(1).tolist() for n in used]
            of_request.append({tuple(draft.tokens_BN[b, node].tolist()) for node in seen})
        paths.append(of_request)
    for smaller, larger in itertools.pairwise(paths):
        assert all(s <= t for s, t in zip(smaller, larger, strict=True))
    assert all(s < t for s, t in zip(paths[0], paths[-1], strict=True))
