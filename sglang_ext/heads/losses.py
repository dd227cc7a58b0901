"""Losses of draft heads. T = rows, S = the head's support."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient q - P is made in the forward pass, in place: logits of a whole vocabulary are the largest tensor
    of a training step, and this way there is one of them."""

    @staticmethod
    def forward(ctx: Any, logits_TS: Tensor, p_TS: Tensor) -> Tensor:
        q_TS = logits_TS.softmax(dim=-1)
        # the largest q is exp(z_max - logsumexp), which saves a pass over the row
        log_norm_T = logits_TS.amax(dim=-1).float() - q_TS.amax(dim=-1).float().log()
        # added up in float32, and rounded to the product's type: asked for as float32, all of it would be copied first,
        # which takes ten times as long; the gradient does not depend on it
        loss_T = log_norm_T - (p_TS * logits_TS).sum(dim=-1).float()
        ctx.save_for_backward(q_TS.sub_(p_TS))
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # called once: the buffer is reused
        (grad_TS,) = ctx.saved_tensors
        return grad_TS.mul_(grads[0][:, None].to(grad_TS.dtype)), None


def soft_cross_entropy(logits_TS: Tensor, p_TS: Tensor) -> Tensor:
    """-sum_v P(v) log q(v) of each row, float32 [T]; its gradient can be taken once."""
    return cast(Tensor, _SoftCrossEntropy.apply(logits_TS, p_TS))


def top_k_loss(logits_TS: Tensor, p_TS: Tensor, k: int) -> Tensor:
    """-sum P(v) log q(v) over the k likeliest tokens v of P (all, where a support is smaller), float32 [T]."""
    p_Tk, best_Tk = p_TS.topk(min(k, p_TS.shape[-1]), dim=-1)
    log_q_Tk = logits_TS.gather(-1, best_Tk).float() - logits_TS.float().logsumexp(dim=-1, keepdim=True)
    return -(p_Tk.float() * log_q_Tk).sum(dim=-1)


DIVERGENCES = ("kl", "tv", "lk")
LK_ETA = 3.0
TOP_K = 10  # HASS's


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What a head's distribution is trained for.

    `divergence` of the distribution q from the target's P: kl, the cross-entropy; tv, the total variation 1 - sum_v
    min(P, q), which is the share of drafts that sampling rejects; lk, l KL + (1 - l) TV with l = exp(-eta a) and a the
    mean acceptance of the rows at hand (LK losses, arXiv 2602.23881), which is KL as long as little is accepted. Of a
    reduced head P is the target's over its tokens, made to sum to 1: what it cannot propose is no part of either.
    `top_k_weight`: of -sum P(v) log q(v) over the `top_k` tokens v that P likes best, added to the divergence
    (HASS, arXiv 2408.15766, section 3.1); 0 leaves it out.
    `keeps_cut_rows`: whether a reduced head learns from rows whose best token it cannot propose (SlimSpec, section 4.2:
    logits are masked), or drops them (EAGLE-3).
    """

    divergence: str = "kl"
    top_k_weight: float = 0.0
    top_k: int = TOP_K
    keeps_cut_rows: bool = False

    def of(self, logits_TS: Tensor, p_TS: Tensor) -> Tensor:
        """The loss of each row, float32 [T]; its gradient can be taken once."""
        loss_T = self._divergence(logits_TS, p_TS)
        if not self.top_k_weight:
            return loss_T
        return loss_T + self.top_k_weight * top_k_loss(logits_TS, p_TS, self.top_k)

    def _divergence(self, logits_TS: Tensor, p_TS: Tensor) -> Tensor:
        if self.divergence == "kl":
            return soft_cross_entropy(logits_TS, p_TS)
        accepted_T = torch.minimum(logits_TS.float().softmax(dim=-1), p_TS.float()).sum(dim=-1)
        if self.divergence == "tv":
            return 1 - accepted_T
        share = torch.exp(-LK_ETA * accepted_T.detach().mean())
        return share * soft_cross_entropy(logits_TS, p_TS) + (1 - share) * (1 - accepted_T)


KL = Objective()
