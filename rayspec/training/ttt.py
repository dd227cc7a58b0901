"""Training-time test: the drafter's loss over its own rollout, with the head run on answer positions only.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = drafter hidden size, G = target
hidden size, V = vocabulary, S = the head's support.

The head's part is done chunk by chunk of rows, forward and backward, without ever holding logits of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayspec.training.csra import csra_gradient
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.recipe import CSRA_TEMPERATURE
from sglang_ext.drafters import family
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.training import Batch, Rows
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.heads.losses import KL, Objective


def check_prompt_lengths(answers: AnswerSet, num_steps: int) -> None:
    """Every row needs a slot at every step. Raises ValueError for prompts that are too short."""
    shortest = int(answers.prompt_length_N.min())
    if shortest < num_steps + 1:
        raise ValueError(
            f"recipe.ttt_steps={num_steps} needs prompts of at least {num_steps + 1} tokens, but {answers.name} has "
            f"one of {shortest}; raise answers.min_prompt_tokens or lower recipe.ttt_steps"
        )


def roll_out(drafter: Drafter, target: FrozenTarget, batch: Batch, num_steps: int) -> Rows:
    """The rows of a batch over a draft of `num_steps` steps, every step given the tokens that are really before it."""
    return family(drafter.kind).training.roll_out(drafter, target, batch, num_steps)


def step_weights(num_steps: int, decay: float, reduction: str) -> list[float]:
    """Of the loss at each draft step: decay^i, for a `reduction` of mean divided by their sum."""
    weights = [decay**i for i in range(num_steps)]
    total = sum(weights) if reduction == "mean" else 1.0
    return [weight / total for weight in weights]


def backward_head(
    head: DraftHead | PositionHeads,
    all_rows: Rows,
    target: FrozenTarget,
    *,
    weights: Sequence[float],
    chunk_rows: int,
    objective: Objective = KL,
    has_hard_labels: bool = False,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Accumulate the head's gradients; returns (d loss / d hidden [K, N, H], loss of each step [K]).

    Loss = sum_i weights[i] * (sum over counted rows of the head's loss at step i) / `num_rows`, which are the rows of
    the whole update where these are a part of it, so that the parts add up to its mean; None for these.
    """
    num_rows = all_rows.hidden_KNH.shape[1] if num_rows is None else num_rows
    grad_KNH = torch.zeros_like(all_rows.hidden_KNH)
    loss_K = torch.zeros(len(weights), device=grad_KNH.device)
    kind = grad_KNH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else grad_KNH.dtype
    for rows, chunk in all_rows.chunks(chunk_rows):
        hidden_KnH = chunk.hidden_KNH.detach().requires_grad_(all_rows.hidden_KNH.requires_grad)
        p_nV = target.distribution(chunk.last_hidden_NG, dtype)
        if has_hard_labels:
            p_nV = torch.zeros_like(p_nV).scatter_(1, chunk.next_ids_N[:, None], 1.0)
        for i, weight in enumerate(weights):
            own = head.at(i)
            step_loss = own.loss(hidden_KnH[i], i, chunk.route(own, i), p_nV, objective).sum() / num_rows
            loss_K[i] += step_loss.detach()
            (weight * step_loss).backward()  # frees this step's logits before the next step's are made
        if hidden_KnH.grad is not None:
            grad_KNH[:, rows] = hidden_KnH.grad
    return grad_KNH, loss_K


class BatchLoss(NamedTuple):
    head_K: Tensor  # at each step, over all rows of the update: where the batch is all of it, their mean
    csra: Tensor | None  # None where it is off
    body: Tensor | None = None  # what the family adds of its own, all steps weighted, as `head_K`; None for nothing


def backward_batch(
    drafter: Drafter,
    target: FrozenTarget,
    batch: Batch,
    *,
    num_steps: int,
    decay: float,
    reduction: str = "sum",
    chunk_rows: int,
    csra_weight: float = 0.0,
    csra_temperature: float = CSRA_TEMPERATURE,
    objective: Objective = KL,
    has_hard_labels: bool = False,
    num_rows: int | None = None,
) -> BatchLoss:
    """One batch: gradients of the head's loss + the body's own + `csra_weight` * CSRA accumulate in the drafter. CSRA
    needs a trainable body, and an update in one batch. `decay`, `reduction`: as of `step_weights`; `num_rows` as of
    `backward_head`."""
    rows = roll_out(drafter, target, batch, num_steps)
    weights = step_weights(len(rows.hidden_KNH), decay, reduction)
    grad_KNH, loss_K = backward_head(
        drafter.lm_head,
        rows,
        target,
        weights=weights,
        chunk_rows=chunk_rows,
        objective=objective,
        has_hard_labels=has_hard_labels,
        num_rows=num_rows,
    )
    csra = None
    if csra_weight:
        assert rows.hidden_KNH.requires_grad, "DrafterTrainConfig refuses CSRA on a frozen body"
        pull_KNH, csra = csra_gradient(rows.hidden_KNH, temperature=csra_temperature, chunk_rows=chunk_rows)
        grad_KNH += csra_weight * pull_KNH
    body = _body_loss(rows, weights, num_rows)
    if body is not None:
        torch.autograd.backward([rows.hidden_KNH, body], [grad_KNH, torch.ones_like(body)])
    elif rows.hidden_KNH.requires_grad:  # not where the body is frozen
        rows.hidden_KNH.backward(grad_KNH)
    return BatchLoss(loss_K, csra, None if body is None else body.detach())


def _body_loss(rows: Rows, weights: Sequence[float], num_rows: int | None) -> Tensor | None:
    """sum_i weights[i] * (sum over the rows of the body's own loss at step i) / `num_rows`, as of `backward_head`."""
    if rows.body_loss_KN is None:
        return None
    steps = [weight * step_N.sum() for weight, step_N in zip(weights, rows.body_loss_KN, strict=True)]
    return torch.stack(steps).sum() / (rows.body_loss_KN.shape[1] if num_rows is None else num_rows)
