"""Training-time test: the drafter's loss over its own rollout, with the head run on answer positions only.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = drafter hidden size, G = target
hidden size, V = vocabulary, S = the head's support.

A row is a position p whose next token x_{p+1} lies in an answer. Step i predicts it from slot t = p - 1 - i, whose
feature is x_t's, and whose input token at that step is x_p. So one target distribution serves all K steps, and the
head's part is done chunk by chunk, forward and backward, without ever holding logits of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rayspec.training.answers import AnswerSet
from rayspec.training.csra import csra_gradient
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint_config import Drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.independent import IndependentDrafter
from sglang_ext.drafters.last_hidden import LastHiddenDrafter
from sglang_ext.drafters.specformer import SpecFormerDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.heads.losses import KL, Objective


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


class Unrolled(NamedTuple):
    """Of each rollout step: the hidden state for the head, and the feature that entered the layer, [B, T - 1, H]."""

    hiddens: list[Tensor]
    features: list[Tensor]


def unroll(drafter: Eagle3Drafter, target: FrozenTarget, ids_BT: Tensor, taps: Tensor, num_steps: int) -> Unrolled:
    """Slot t of step i predicts x_{t+2+i}.

    Embeddings past the end are those of token 0; no row reads such a slot.
    """
    B, T = ids_BT.shape
    shifted = F.pad(ids_BT[:, 1:], (0, num_steps - 1))
    feature = drafter.fuse(taps[:, :-1].to(drafter.fc.weight.dtype))
    positions_1T = torch.arange(T - 1, device=ids_BT.device)[None]
    cache: list[tuple[Tensor, Tensor]] = []
    unrolled = Unrolled([], [])
    for i in range(num_steps):
        unrolled.features.append(feature)
        embed = target.embed(shifted[:, i : i + T - 1]).to(feature.dtype)
        hidden, feature = drafter.step(embed, feature, (positions_1T + i).expand(B, -1), cache)
        unrolled.hiddens.append(hidden)
    return unrolled


class Rows(NamedTuple):
    """What the head sees of each row, at every step."""

    hidden_KNH: Tensor
    feature_KNH: Tensor | None  # without gradient; None for a head that does not route
    embed_KNH: Tensor  # of the token that a router sees
    last_hidden_NG: Tensor  # the target's, of the position before the predicted token
    next_ids_N: Tensor  # the predicted token, as it stands in the answer

    def chunks(self, size: int) -> Iterator[tuple[slice, Rows]]:
        for start in range(0, len(self.last_hidden_NG), size):
            rows = slice(start, start + size)
            feature = None if self.feature_KNH is None else self.feature_KNH[:, rows]
            yield (
                rows,
                Rows(
                    self.hidden_KNH[:, rows],
                    feature,
                    self.embed_KNH[:, rows],
                    self.last_hidden_NG[rows],
                    self.next_ids_N[rows],
                ),
            )

    def route(self, head: DraftHead, step: int) -> Tensor | None:
        return None if self.feature_KNH is None else head.route(self.embed_KNH[step], self.feature_KNH[step], step)


def roll_out(drafter: Drafter, target: FrozenTarget, batch: Batch, num_steps: int) -> Rows:
    """The rows of a batch over a draft of `num_steps` steps, every step given the tokens that are really before it."""
    if isinstance(drafter, LastHiddenDrafter):
        return _read_carried(drafter, target, batch, num_steps)
    if isinstance(drafter, IndependentDrafter):
        return _read_tokens(drafter, target, batch, num_steps)
    taps, last_hidden = target.features(batch.ids_BT)
    unrolled = unroll(drafter, target, batch.ids_BT, taps, num_steps)

    def gather(states: list[Tensor]) -> Tensor:
        return torch.stack([h[batch.sequence_N, batch.position_N - 1 - i] for i, h in enumerate(states)])

    return Rows(
        gather(unrolled.hiddens),
        gather([f.detach() for f in unrolled.features]) if drafter.lm_head.routes else None,
        # the input token at every step is the one before the predicted one
        target.embed(batch.ids_BT[batch.sequence_N, batch.position_N]).expand(num_steps, -1, -1),
        last_hidden[batch.sequence_N, batch.position_N],
        batch.next_ids_N,
    )


def carried(drafter: LastHiddenDrafter, target: FrozenTarget, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The vector [B, T, H] that the drafter would draft from after each token, in its dtype, and the target's last
    hidden state [B, T, G]."""
    dtype = next(drafter.parameters()).dtype
    if isinstance(drafter, SpecFormerDrafter):
        taps, last_hidden = target.features(ids_BT, drafter.config.tap_layers)
        return drafter.context(taps.to(dtype)), last_hidden
    last_hidden = target.last_hidden(ids_BT)
    return last_hidden.to(dtype), last_hidden


def _read_carried(drafter: LastHiddenDrafter, target: FrozenTarget, batch: Batch, num_steps: int) -> Rows:
    """Position i predicts x_{p+1} from the vector after x_{p-1-i} and, where it reads the path, x_{p-i} .. x_p."""
    carried_BTH, last_hidden = carried(drafter, target, batch.ids_BT)
    own_BTKH = drafter.begin(carried_BTH.flatten(0, 1), num_steps).unflatten(0, carried_BTH.shape[:2])
    states, features, embeds = [], [], []
    for i in range(num_steps):
        before_N = batch.position_N - 1 - i
        path_Nd = batch.position_N[:, None] + torch.arange(-i, 1)
        path_NdH = target.embed(batch.ids_BT[batch.sequence_N[:, None], path_Nd]).to(carried_BTH.dtype)
        own_NH = own_BTKH[batch.sequence_N, before_N, i]
        states.append(drafter.state(i, own_NH, path_NdH if drafter.reads_path else None))
        features.append(carried_BTH[batch.sequence_N, before_N].detach())
        embeds.append(path_NdH[:, -1 if drafter.reads_path else 0])  # what is known when the position is drafted
    return Rows(
        torch.stack(states),
        torch.stack(features) if drafter.lm_head.routes else None,
        torch.stack(embeds),
        last_hidden[batch.sequence_N, batch.position_N],
        batch.next_ids_N,
    )


def _read_tokens(drafter: IndependentDrafter, target: FrozenTarget, batch: Batch, num_steps: int) -> Rows:
    """x_{p+1} is predicted from x_1 .. x_p at every step: a drafted token is read as any other."""
    hidden_BTH = drafter(batch.ids_BT[:, 1:-1])
    embed_NH = drafter.embed(batch.ids_BT[batch.sequence_N, batch.position_N]).detach()
    embed_KNH = embed_NH.expand(num_steps, -1, -1)
    return Rows(
        hidden_BTH[batch.sequence_N, batch.position_N - 1].expand(num_steps, -1, -1),
        embed_KNH if drafter.lm_head.routes else None,
        embed_KNH,
        target.last_hidden(batch.ids_BT)[batch.sequence_N, batch.position_N],
        batch.next_ids_N,
    )


def backward_head(
    head: DraftHead | PositionHeads,
    all_rows: Rows,
    target: FrozenTarget,
    *,
    decay: float,
    chunk_rows: int,
    objective: Objective = KL,
    has_hard_labels: bool = False,
) -> tuple[Tensor, Tensor]:
    """Accumulate the head's gradients; returns (d loss / d hidden [K, N, H], mean loss of each step [K]).

    Loss = sum_i decay^i * (sum over counted rows of the head's loss at step i) / N.
    """
    K, N, _ = all_rows.hidden_KNH.shape
    grad_KNH = torch.zeros_like(all_rows.hidden_KNH)
    loss_K = torch.zeros(K)
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else all_rows.hidden_KNH.dtype
    for rows, chunk in all_rows.chunks(chunk_rows):
        hidden_KnH = chunk.hidden_KNH.detach().requires_grad_(all_rows.hidden_KNH.requires_grad)
        p_nV = target.distribution(chunk.last_hidden_NG, dtype)
        if has_hard_labels:
            p_nV = torch.zeros_like(p_nV).scatter_(1, chunk.next_ids_N[:, None], 1.0)
        for i in range(K):
            own = head.at(i)
            step_loss = own.loss(hidden_KnH[i], i, chunk.route(own, i), p_nV, objective).sum() / N
            loss_K[i] += step_loss.detach()
            (decay**i * step_loss).backward()  # frees this step's logits before the next step's are made
        if hidden_KnH.grad is not None:
            grad_KNH[:, rows] = hidden_KnH.grad
    return grad_KNH, loss_K


class BatchLoss(NamedTuple):
    head_K: Tensor  # mean over the rows at each step
    csra: Tensor | None  # None where it is off


def backward_batch(
    drafter: Drafter,
    target: FrozenTarget,
    batch: Batch,
    *,
    num_steps: int,
    decay: float,
    chunk_rows: int,
    csra_weight: float = 0.0,
    csra_temperature: float = 0.07,
    objective: Objective = KL,
    has_hard_labels: bool = False,
) -> BatchLoss:
    """One batch: gradients of the head's loss + `csra_weight` * CSRA accumulate in the drafter. CSRA needs a trainable
    body."""
    rows = roll_out(drafter, target, batch, num_steps)
    grad_KNH, loss_K = backward_head(
        drafter.lm_head,
        rows,
        target,
        decay=decay,
        chunk_rows=chunk_rows,
        objective=objective,
        has_hard_labels=has_hard_labels,
    )
    csra = None
    if csra_weight:
        assert rows.hidden_KNH.requires_grad, "DrafterTrainConfig refuses CSRA on a frozen body"
        pull_KNH, csra = csra_gradient(rows.hidden_KNH, temperature=csra_temperature, chunk_rows=chunk_rows)
        grad_KNH += csra_weight * pull_KNH
    if rows.hidden_KNH.requires_grad:  # not where the body is frozen
        rows.hidden_KNH.backward(grad_KNH)
    return BatchLoss(loss_K, csra)
