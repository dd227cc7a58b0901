"""Where a low-rank head starts: the best approximation of its rank, weighted by what the head will meet."""

import pytest
import torch
from head_cases import SPECS, TARGET_HEAD_VH, H, V, make_head, seeded
from torch import Tensor

from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.slimspec import MOMENT_FLOOR, SHARE_FLOOR, low_rank

WEIGHT_VH = TARGET_HEAD_VH.float()
STATES_TH = seeded(400, H, seed=3).float() * torch.logspace(-1, 1, H)  # some directions are much larger than others
MOMENTS = {"hidden_moment": STATES_TH.T @ STATES_TH / 400, "token_share": torch.linspace(3, 0, V).softmax(dim=0)}
SOME = [{}, {"hidden_moment"}, {"token_share"}, set(MOMENTS)]


def given(names: set[str]) -> dict[str, Tensor]:
    return {name: MOMENTS[name] for name in names}


def weighted(matrix_VH: Tensor, names: set[str]) -> Tensor:
    """The matrix in whose plain norm the weighted error is measured."""
    share_V = MOMENTS["token_share"] + SHARE_FLOOR * MOMENTS["token_share"].mean()
    moment_HH = MOMENTS["hidden_moment"] + MOMENT_FLOOR * MOMENTS["hidden_moment"].diagonal().mean() * torch.eye(H)
    if "token_share" in names:
        matrix_VH = share_V.sqrt()[:, None] * matrix_VH
    return matrix_VH @ torch.linalg.cholesky(moment_HH) if "hidden_moment" in names else matrix_VH


@pytest.mark.parametrize("names", SOME, ids=["plain", "whitened", "by_share", "both"])
@pytest.mark.parametrize("rank", [1, 5, H - 1])
def test_start_has_the_least_weighted_error_of_its_rank(rank: int, names: set[str]) -> None:
    down_rH, up_Vr = low_rank(WEIGHT_VH, rank, given(names))
    error = weighted(WEIGHT_VH - up_Vr @ down_rH, names).norm()
    least = torch.linalg.svdvals(weighted(WEIGHT_VH, names))[rank:].norm()  # Eckart and Young
    torch.testing.assert_close(error, least, rtol=1e-3, atol=0)
    torch.testing.assert_close(up_Vr.norm(dim=0), down_rH.norm(dim=1))  # one learning rate must suit both


@pytest.mark.parametrize("names", SOME, ids=["plain", "whitened", "by_share", "both"])
def test_full_rank_is_the_matrix(names: set[str]) -> None:
    # states that span three directions only: the floor keeps the others
    few = {"hidden_moment": STATES_TH[:3].T @ STATES_TH[:3], "token_share": torch.eye(V)[0]}
    down_rH, up_Vr = low_rank(WEIGHT_VH, H, {name: few[name] for name in names})
    torch.testing.assert_close(up_Vr @ down_rH, WEIGHT_VH, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["slimspec", "specvocab"])
def test_heads_with_low_rank_factors_take_the_moments(kind: str) -> None:
    plain, head = make_head(SPECS[kind]), head_from_target(parse_head(SPECS[kind]), TARGET_HEAD_VH, MOMENTS)
    down_rH, up_Vr = low_rank(WEIGHT_VH, head.config.rank, MOMENTS)
    assert torch.equal(head.down, down_rH)
    assert torch.equal(head.up, up_Vr)
    assert not torch.allclose(head.up @ head.down, plain.up @ plain.down)


def test_the_weighted_start_agrees_more_often_with_the_whole_matrix() -> None:
    """On states that the moments were not taken from; a quarter of the rank."""
    weight_VH = seeded(400, H, seed=5).float()
    scale_H = torch.logspace(0.7, -0.7, H)[torch.randperm(H, generator=torch.Generator().manual_seed(1))]
    met_TH, new_TH = (seeded(600, H, seed=seed).float() * scale_H for seed in (6, 7))
    best_T = (new_TH @ weight_VH.T).argmax(dim=-1)

    def agreement(artifacts: dict[str, Tensor]) -> float:
        down_rH, up_Vr = low_rank(weight_VH, H // 4, artifacts)
        return float(((new_TH @ down_rH.T @ up_Vr.T).argmax(dim=-1) == best_T).float().mean())

    distributions_TV = (met_TH @ weight_VH.T).softmax(dim=-1)
    whitened = {"hidden_moment": met_TH.T @ met_TH / 600}
    assert agreement(whitened) > agreement({}) + 0.1
    assert agreement({**whitened, "token_share": distributions_TV.mean(dim=0)}) > agreement({}) + 0.1
