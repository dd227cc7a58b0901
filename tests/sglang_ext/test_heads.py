"""The algebra of draft heads (METHODS section 12). Sizes are odd where a size could be taken for another."""

import pytest
import torch
from torch import Tensor

from sglang_ext.heads import HEADS, build_head, head_from_target

V, H, T = 53, 24, 7
SPECS = [{"kind": "full"}, {"kind": "slimspec", "rank": 5}]
IDS = [spec["kind"] for spec in SPECS]


@pytest.fixture
def target_head_VH() -> Tensor:
    return torch.randn(V, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def hidden_TH() -> Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_every_kind_is_covered() -> None:
    assert set(IDS) == set(HEADS)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_distribution_sums_to_one_and_propose_agrees(spec: dict, target_head_VH: Tensor, hidden_TH: Tensor) -> None:
    head = head_from_target(spec, target_head_VH).double()
    q, ids = head.distribution(hidden_TH)
    torch.testing.assert_close(q.sum(dim=-1), torch.ones(T))
    proposal = head.propose(hidden_TH, 0, 4)
    assert ids is None
    top = q.topk(4)
    torch.testing.assert_close((proposal.scores_Tk - proposal.log_norm_T[:, None]).exp(), top.values)
    assert torch.equal(proposal.token_ids_Tk, top.indices)
    assert torch.equal(head.propose(hidden_TH, 0, 1).token_ids_Tk, proposal.token_ids_Tk[:, :1])
    assert torch.equal(head.target_logits(hidden_TH).argmax(-1), proposal.token_ids_Tk[:, 0])


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_training_targets_are_a_law(spec: dict, target_head_VH: Tensor) -> None:
    p = torch.softmax(torch.randn(T, V), dim=-1)
    targets, mask = head_from_target(spec, target_head_VH).training_targets(p)
    torch.testing.assert_close(targets.sum(dim=-1), torch.ones(T))
    assert mask.dtype == torch.bool
    assert bool(mask.all())


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_options_round_trip(spec: dict) -> None:
    head = build_head(spec, hidden_size=H, vocab_size=V)
    assert {"kind": head.kind, **head.config.options()} == spec


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_gradients_reach_every_parameter(spec: dict, target_head_VH: Tensor, hidden_TH: Tensor) -> None:
    head = head_from_target(spec, target_head_VH).double()
    head.candidates(hidden_TH).logits_TS.square().sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert float(parameter.grad.abs().max()) > 0, name


def test_full_head_is_the_target_head(target_head_VH: Tensor, hidden_TH: Tensor) -> None:
    head = head_from_target({"kind": "full"}, target_head_VH).double()
    torch.testing.assert_close(head.candidates(hidden_TH).logits_TS, hidden_TH @ target_head_VH.T.float().double())


def test_slim_head_of_full_rank_is_the_full_head(target_head_VH: Tensor, hidden_TH: Tensor) -> None:
    slim = head_from_target({"kind": "slimspec", "rank": H}, target_head_VH).double()
    full = head_from_target({"kind": "full"}, target_head_VH).double()
    got, expected = slim.candidates(hidden_TH).logits_TS, full.candidates(hidden_TH).logits_TS
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # float32 SVD


@pytest.mark.parametrize("rank", [1, 5, H - 1])
def test_slim_head_is_the_best_approximation_of_its_rank(rank: int, target_head_VH: Tensor) -> None:
    slim = head_from_target({"kind": "slimspec", "rank": rank}, target_head_VH)
    error = torch.linalg.norm(slim.up.double() @ slim.down.double() - target_head_VH)
    discarded = torch.linalg.svdvals(target_head_VH)[rank:]
    torch.testing.assert_close(error, discarded.square().sum().sqrt(), rtol=1e-4, atol=1e-4)  # Eckart-Young


def test_slim_head_holds_rank_times_h_plus_v_parameters() -> None:
    slim = build_head({"kind": "slimspec", "rank": 5}, hidden_size=H, vocab_size=V)
    assert sum(p.numel() for p in slim.parameters()) == 5 * (H + V)
    assert all(p.numel() < V * H for p in slim.parameters())


def test_cost_counts_weights_once_and_rows_each() -> None:
    full = build_head({"kind": "full"}, hidden_size=H, vocab_size=V)
    slim = build_head({"kind": "slimspec", "rank": 5}, hidden_size=H, vocab_size=V)
    assert full.cost(3).flops == 2 * 3 * H * V
    assert slim.cost(3).flops == 2 * 3 * 5 * (H + V)
    assert full.cost(1).bytes == 4 * (H * V + H + V)
    assert slim.cost(1).bytes == 4 * (5 * (H + V) + H + 2 * 5 + V)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kind": "slimspek", "rank": 4}, "unknown draft_head.kind 'slimspek'; known: full, slimspec"),
        ({"rank": 4}, "draft_head needs a 'kind'"),
        ({"kind": "slimspec"}, "needs the options rank"),
        ({"kind": "slimspec", "rank": 0}, "draft_head.rank must be in 1..24"),
        ({"kind": "slimspec", "rank": 25}, "got 25"),
        ({"kind": "full", "rank": 4}, "has no option 'rank'"),
    ],
    ids=["unknown", "no_kind", "missing", "zero", "too_large", "superfluous"],
)
def test_bad_specs_say_what_is_allowed(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("..", r"\.\.")):
        build_head(spec, hidden_size=H, vocab_size=V)


def test_unloaded_weights_are_loud() -> None:
    head = build_head({"kind": "full"}, hidden_size=H, vocab_size=V)
    assert head.candidates(torch.ones(1, H)).logits_TS.isnan().all()


def test_k_outside_of_the_support() -> None:
    head = build_head({"kind": "full"}, hidden_size=H, vocab_size=V)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.53"):
        head.propose(torch.ones(1, H), 0, V + 1)
