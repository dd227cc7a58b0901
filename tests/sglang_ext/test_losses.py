"""What a head's distribution can be trained for."""

from math import exp

import pytest
import torch
from head_cases import SPECS, TRUNCATED, Rows, V, make_head, ranked_ids, some_distribution

from sglang_ext.heads.losses import DIVERGENCES, LK_ETA, Objective

T = 9


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, V, generator=torch.Generator().manual_seed(3)).requires_grad_(), some_distribution(T).float()


def test_total_variation_is_the_share_that_sampling_rejects() -> None:
    logits_TV, p_TV = distributions()
    q_TV = logits_TV.softmax(dim=-1)
    apart_T = (p_TV - q_TV).abs().sum(dim=-1)
    torch.testing.assert_close(Objective(divergence="tv").of(logits_TV, p_TV), 0.5 * apart_T)


def test_lk_goes_from_kl_to_total_variation_as_more_is_accepted() -> None:
    logits_TV, p_TV = distributions()
    kl_T, tv_T = (Objective(divergence=name).of(logits_TV, p_TV).detach() for name in ("kl", "tv"))
    share = exp(-LK_ETA * float((1 - tv_T).mean()))
    assert 0.05 < share < 0.95
    lk_T = Objective(divergence="lk").of(logits_TV, p_TV)
    torch.testing.assert_close(lk_T, share * kl_T + (1 - share) * tv_T)
    # the share is no way to lower the loss: no gradient flows through it
    (grad,) = torch.autograd.grad(lk_T.sum(), logits_TV)
    parts = [torch.autograd.grad(Objective(divergence=n).of(logits_TV, p_TV).sum(), logits_TV)[0] for n in ("kl", "tv")]
    torch.testing.assert_close(grad, share * parts[0] + (1 - share) * parts[1])


def test_hass_adds_the_likeliest_tokens_part_of_the_cross_entropy() -> None:
    logits_TV, p_TV = distributions()
    kl = Objective()
    best_TV = torch.zeros_like(p_TV).scatter(1, p_TV.topk(3, dim=-1).indices, 1.0)
    expected_T = kl.of(logits_TV, p_TV) - 2 * (best_TV * p_TV * logits_TV.log_softmax(dim=-1)).sum(dim=-1)
    found_T = Objective(top_k_weight=2.0, top_k=3).of(logits_TV, p_TV)
    torch.testing.assert_close(found_T, expected_T)
    grads = [torch.autograd.grad(loss_T.sum(), logits_TV)[0] for loss_T in (found_T, expected_T)]
    torch.testing.assert_close(*grads)
    assert Objective(top_k_weight=1.0, top_k=V + 1).of(logits_TV, p_TV).isfinite().all(), "a smaller support: all of it"


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("kind", ["full", "slimspec", "truncated", "specvocab", "coral", "rdk_truncated"])
def test_every_head_that_learns_a_distribution_takes_the_objective(kind: str, divergence: str) -> None:
    """A specvocab and a coral head add their router's own loss, which is not the objective's."""
    head, drawn, p_TV = make_head(SPECS[kind]).float(), Rows.draw(T).to(torch.float32), some_distribution(T).float()
    found = {}
    for name in ("kl", divergence):
        hidden_TH = drawn.hidden_TH.clone().requires_grad_()
        found[name] = head.loss(hidden_TH, 0, None, p_TV, Objective(divergence=name)).detach()
    assert torch.equal(found["kl"], found[divergence]) == (divergence == "kl")


def test_a_reduced_head_may_keep_the_rows_whose_best_token_is_cut() -> None:
    head, drawn, p_TV = make_head(TRUNCATED).float(), Rows.draw(50).to(torch.float32), some_distribution(50).float()
    dropped_T = head.loss(drawn.hidden_TH, 0, None, p_TV)
    kept_T = head.loss(drawn.hidden_TH, 0, None, p_TV, Objective(keeps_cut_rows=True))
    is_cut_T = ~torch.isin(p_TV.argmax(dim=-1), ranked_ids()[: len(head.ids)])
    assert 10 < int(is_cut_T.sum()) < 40
    assert torch.equal(kept_T[~is_cut_T], dropped_T[~is_cut_T])
    assert not bool(dropped_T[is_cut_T].any())
    q_TS, p_TS = head.distribution(drawn.hidden_TH)[0], p_TV[:, head.ids]
    p_TS = p_TS / p_TS.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(kept_T, -(p_TS * q_TS.log()).sum(dim=-1))
    nothing_TV = torch.zeros(1, V)
    nothing_TV[0, next(v for v in range(V) if v not in head.ids)] = 1.0  # no mass on the ids is nothing to learn
    assert float(head.loss(drawn.hidden_TH[:1], 0, None, nothing_TV, Objective(keeps_cut_rows=True))) == 0
