"""The heads that see the whole vocabulary: full and SlimSpec."""

import pytest
import torch
from head_cases import SPECS, TARGET_HEAD_VH, H, Rows, V, cross_entropy, make_head, some_distribution
from torch import Tensor

from sglang_ext.heads import build_head, parse_head

T = 7


def test_full_head_is_the_target_head() -> None:
    head, drawn = make_head(SPECS["full"]).double(), Rows.draw(T)
    expected = drawn.hidden_TH @ TARGET_HEAD_VH.T.float().double()
    torch.testing.assert_close(head.candidates(drawn.hidden_TH).logits_TS, expected)


def test_slim_head_of_full_rank_is_the_full_head() -> None:
    slim, full = (make_head(spec).double() for spec in ({"kind": "slimspec", "rank": H}, SPECS["full"]))
    drawn = Rows.draw(T)
    got, expected = slim.candidates(drawn.hidden_TH).logits_TS, full.candidates(drawn.hidden_TH).logits_TS
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)  # float32 SVD


@pytest.mark.parametrize("rank", [1, 5, H - 1])
def test_slim_head_is_the_best_approximation_of_its_rank(rank: int) -> None:
    slim = make_head({"kind": "slimspec", "rank": rank})
    error = torch.linalg.norm(slim.up.double() @ slim.down.double() - TARGET_HEAD_VH)
    discarded = torch.linalg.svdvals(TARGET_HEAD_VH)[rank:]
    torch.testing.assert_close(error, discarded.square().sum().sqrt(), rtol=1e-4, atol=1e-4)  # Eckart-Young


def test_slim_head_holds_rank_times_h_plus_v_parameters() -> None:
    slim = build_head(parse_head(SPECS["slimspec"]), hidden_size=H, vocab_size=V)
    assert sum(p.numel() for p in slim.parameters()) == 5 * (H + V)
    assert all(p.numel() < V * H for p in slim.parameters())


@pytest.mark.parametrize("kind", ["full", "slimspec"])
def test_loss_is_the_cross_entropy_to_the_target(kind: str) -> None:
    head, drawn, p_TV = make_head(SPECS[kind]).double(), Rows.draw(T), some_distribution(T)

    def loss(hidden_TH: Tensor) -> Tensor:
        return cross_entropy(head.candidates(hidden_TH).logits_TS, p_TV.double())

    got_TH, expected_TH = (drawn.hidden_TH.clone().requires_grad_() for _ in range(2))
    got_T, expected_T = head.loss(got_TH, 2, None, p_TV.double()), loss(expected_TH)
    torch.testing.assert_close(got_T.double(), expected_T, rtol=1e-5, atol=1e-5)  # accumulated in float32
    got_T.sum().backward()
    expected_T.sum().backward()
    torch.testing.assert_close(got_TH.grad, expected_TH.grad)


def test_cost_counts_weights_once_and_rows_each() -> None:
    full, slim = make_head(SPECS["full"]), make_head(SPECS["slimspec"])
    assert full.cost(3) == (4 * (H * V + 3 * (H + V)), 2 * 3 * H * V)
    assert slim.cost(3) == (4 * (5 * (H + V) + 3 * (H + 2 * 5 + V)), 2 * 3 * 5 * (H + V))


@pytest.mark.parametrize(
    ("rank", "allowed"), [(0, "at least 1, got 0"), (25, r"in 1\.\.24 \(the smaller of .*\), got 25")]
)
def test_rank_is_checked(rank: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"draft_head\.rank must be {allowed}"):
        build_head(parse_head({"kind": "slimspec", "rank": rank}), hidden_size=H, vocab_size=V)
