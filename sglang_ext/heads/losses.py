"""Losses of draft heads. T = rows, S = the head's support."""

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
        loss_T = log_norm_T - (p_TS * logits_TS).sum(dim=-1, dtype=torch.float32)
        ctx.save_for_backward(q_TS.sub_(p_TS))
        return loss_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # called once: the buffer is reused
        (grad_TS,) = ctx.saved_tensors
        return grad_TS.mul_(grads[0][:, None].to(grad_TS.dtype)), None


def soft_cross_entropy(logits_TS: Tensor, p_TS: Tensor) -> Tensor:
    """-sum_v P(v) log q(v) of each row, float32 [T]; its gradient can be taken once."""
    return cast(Tensor, _SoftCrossEntropy.apply(logits_TS, p_TS))
