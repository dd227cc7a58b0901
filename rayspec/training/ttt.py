"""Training-time test: the drafter's loss over its own rollout, with the head run on answer positions only.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = drafter hidden size, G = target
hidden size, V = vocabulary, S = the head's support.

A row is a position p whose next token x_{p+1} lies in an answer. Step i predicts it from slot t = p - 1 - i, whose
feature is x_t's, and whose input token at that step is x_p. So one target distribution serves all K steps, and the
head's part is done chunk by chunk, forward and backward, without ever holding logits of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rayspec.training.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.heads import DraftHead


@dataclass(frozen=True)
class Batch:
    """Sequences (trimmed to the longest) and their rows as (sequence, position) pairs, in order."""

    ids_BT: Tensor  # int64
    sequence_N: Tensor  # int64
    position_N: Tensor  # int64, p

    @classmethod
    def of(cls, answers: AnswerSet, indices: Tensor) -> Batch:
        T = int(answers.length_N[indices].max())
        # row p predicts p + 1, so the mask moves one to the left
        mask_BT = answers.loss_mask_NL[indices, 1:T]
        sequence_N, position_N = mask_BT.nonzero(as_tuple=True)
        return cls(answers.token_ids_NL[indices, :T].long(), sequence_N, position_N)

    @property
    def next_ids_N(self) -> Tensor:
        return self.ids_BT[self.sequence_N, self.position_N + 1]


def check_prompt_lengths(answers: AnswerSet, num_steps: int) -> None:
    """Every row needs a slot at every step. Raises ValueError for prompts that are too short."""
    shortest = int(answers.prompt_length_N.min())
    if shortest < num_steps + 1:
        raise ValueError(
            f"recipe.ttt_steps={num_steps} needs prompts of at least {num_steps + 1} tokens, but {answers.name} has "
            f"one of {shortest}; raise answers.min_prompt_tokens or lower recipe.ttt_steps"
        )


def unroll(drafter: Eagle3Drafter, target: FrozenTarget, ids_BT: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
    """Hidden states for the head, [B, T - 1, H] of each step: slot t of step i predicts x_{t+2+i}.

    Embeddings past the end are those of token 0; no row reads such a slot.
    """
    B, T = ids_BT.shape
    shifted = F.pad(ids_BT[:, 1:], (0, num_steps - 1))
    feature = drafter.fuse(taps[:, :-1].to(drafter.fc.weight.dtype))
    positions_1T = torch.arange(T - 1, device=ids_BT.device)[None]
    cache: list[tuple[Tensor, Tensor]] = []
    hiddens = []
    for i in range(num_steps):
        embed = target.embed(shifted[:, i : i + T - 1]).to(feature.dtype)
        hidden, feature = drafter.step(embed, feature, (positions_1T + i).expand(B, -1), cache)
        hiddens.append(hidden)
    return hiddens


def gather_rows(hiddens: list[Tensor], batch: Batch) -> Tensor:
    """[K, N, H]: each row's hidden state at every step."""
    return torch.stack([h[batch.sequence_N, batch.position_N - 1 - i] for i, h in enumerate(hiddens)])


class SoftCrossEntropy(torch.autograd.Function):
    """-sum_v P(v) log q(v) of each row, float32 [T]; the gradient q - P is made in the forward pass, in place."""

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


def backward_head(
    head: DraftHead,
    hidden_KNH: Tensor,
    last_hidden_NG: Tensor,
    embed_NH: Tensor,
    target: FrozenTarget,
    *,
    decay: float,
    chunk_rows: int,
) -> tuple[Tensor, Tensor]:
    """Accumulate the head's gradients; returns (d loss / d hidden [K, N, H], mean loss of each step [K]).

    Loss = sum_i decay^i * (sum over counted rows of CE(P, q_i)) / N.
    """
    K, N, _ = hidden_KNH.shape
    grad_KNH = torch.empty_like(hidden_KNH)
    loss_K = torch.zeros(K)
    for start in range(0, N, chunk_rows):
        rows = slice(start, start + chunk_rows)
        hidden_KnH = hidden_KNH[:, rows].detach().requires_grad_()
        total = hidden_KNH.new_zeros((), dtype=torch.float32)
        p_nS: Tensor | None = None
        for i, hidden_nH in enumerate(hidden_KnH.unbind()):
            logits_nS = head.logits(hidden_nH, i, embed_NH[rows])
            if p_nS is None:
                p_nV = target.distribution(last_hidden_NG[rows], logits_nS.dtype)
                p_nS, counts_n = head.training_targets(p_nV)
            loss_n: Tensor = SoftCrossEntropy.apply(logits_nS, p_nS)
            step_loss = (loss_n * counts_n).sum() / N
            loss_K[i] += step_loss.detach()
            total = total + decay**i * step_loss
        total.backward()
        assert hidden_KnH.grad is not None, "the head ignores its hidden state"
        grad_KNH[:, rows] = hidden_KnH.grad
    return grad_KNH, loss_K


def backward_batch(
    drafter: Eagle3Drafter,
    target: FrozenTarget,
    batch: Batch,
    *,
    num_steps: int,
    decay: float,
    chunk_rows: int,
) -> Tensor:
    """One batch: gradients accumulate in the drafter; returns the mean loss of each step [K]."""
    taps, last_hidden = target.features(batch.ids_BT)
    last_hidden_NG = last_hidden[batch.sequence_N, batch.position_N]
    embed_NH = target.embed(batch.ids_BT[batch.sequence_N, batch.position_N])
    hidden_KNH = gather_rows(unroll(drafter, target, batch.ids_BT, taps, num_steps), batch)
    grad_KNH, loss_K = backward_head(
        drafter.lm_head, hidden_KNH, last_hidden_NG, embed_NH, target, decay=decay, chunk_rows=chunk_rows
    )
    hidden_KNH.backward(grad_KNH)
    return loss_K
