"""Held-out acceptance of a drafter, estimated from teacher forcing on the target's answers, as a rule its greedy ones.

K = draft steps, N = answer positions, R = chains, V = vocabulary.

While all earlier drafts of a chain equal the target's greedy tokens, the drafter's inputs are those tokens; so one
rollout over the known answer gives what real drafting would accept.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads.base import NO_TOKEN


@dataclass(frozen=True)
class Acceptance:
    """Greedy drafting of up to K tokens. `u[i]`: share of chains whose first i + 1 drafts are all right."""

    u: list[float]
    conditional: list[float]  # a_i = u_i / u_{i-1}
    tau: list[float]  # tau[k - 1] = 1 + u_1 + .. + u_k: k draft steps, every answer position as a start
    tau_walk: float  # K draft steps from the positions that decoding would really stop at
    overlap: list[float]  # sum_v min(p, q) of each step: acceptance when sampling at temperature 1
    support: list[float]  # tokens that the head scores for a row at each step, mean
    mass: list[float]  # p(S), of the target where q is not 0: on these tokens, and with rdk on those it hands on to
    tv_on_support: list[float]  # total variation of q from the target's distribution there, p(. | S)
    chains: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


OF_DISTRIBUTIONS = ("overlap", "support", "mass", "tv_on_support")


@torch.no_grad()
def measure(
    drafter: Drafter,
    target: FrozenTarget,
    answers: AnswerSet,
    *,
    num_steps: int,
    batch_size: int,
    chunk_rows: int,
    sequences: Tensor | None = None,
) -> Acceptance:
    """Acceptance along these sequences of the answers (their indices), else along all greedy ones. Along drawn ones
    `OF_DISTRIBUTIONS` say what they always do; all else then counts drafts that equal what was drawn. Raises ValueError
    if there is nothing to measure."""
    sequences = greedy_sequences(answers) if sequences is None else sequences
    chains: list[Tensor] = []
    sums_4K, rows = torch.zeros(4, num_steps), 0
    accepted = steps = 0
    for indices in sequences.split(batch_size):
        batch = Batch.of(answers, indices, target.device)
        match_KN, batch_sums_4K = _rollout(drafter, target, batch, num_steps, chunk_rows)
        sums_4K += batch_sums_4K
        rows += match_KN.shape[1]
        for own_KN in match_KN.split(_answer_lengths(batch), dim=1):
            # row n drafts for position n at step 0, n + 1 at step 1 ...: a chain is a diagonal
            count = own_KN.shape[1] - num_steps + 1
            if count < 1:
                continue
            chain_RK = torch.stack([own_KN[i, i : i + count] for i in range(num_steps)], dim=1)
            prefix_RK = chain_RK.int().cumprod(dim=1)
            chains.append(prefix_RK)
            lengths = prefix_RK.sum(dim=1).tolist()
            # the first answer token comes from the prompt's own forward pass, so the first chain starts after it
            start = 1
            while start < count:
                accepted, steps, start = accepted + lengths[start], steps + 1, start + 1 + lengths[start]
    if not chains or not steps:
        raise ValueError(
            f"no held-out answer is as long as {num_steps + 1} tokens; raise held_out.answer_tokens or held_out.count"
        )
    prefix_RK = torch.cat(chains)
    u = prefix_RK.double().mean(dim=0)
    before = torch.cat([torch.ones(1, dtype=u.dtype), u[:-1]])
    return Acceptance(
        u=u.tolist(),
        conditional=(u / before.clamp_min(1e-12)).tolist(),
        tau=(1 + u.cumsum(dim=0)).tolist(),
        tau_walk=1 + accepted / steps,
        **{name: (sum_K / rows).tolist() for name, sum_K in zip(OF_DISTRIBUTIONS, sums_4K, strict=True)},
        chains=len(prefix_RK),
    )


def greedy_sequences(answers: AnswerSet) -> Tensor:
    """Their indices. Raises ValueError where there are none."""
    greedy = (answers.temperature_N == 0).nonzero().squeeze(1)
    if not len(greedy):
        raise ValueError(f"the held-out answers {answers.name} hold no greedy sequence; set held_out.greedy_share: 1")
    return greedy


@torch.no_grad()
def verify_steps(
    drafter: Drafter, target: FrozenTarget, answers: AnswerSet, *, num_steps: int, batch_size: int, chunk_rows: int
) -> list[int]:
    """How many verify steps greedy drafting of up to `num_steps` tokens takes for each answer."""
    found = []
    for indices in torch.arange(len(answers)).split(batch_size):
        batch = Batch.of(answers, indices, target.device)
        match_KN, _ = _rollout(drafter, target, batch, num_steps, chunk_rows)
        found += [_steps_of(own_KN) for own_KN in match_KN.split(_answer_lengths(batch), dim=1)]
    return found


def _steps_of(match_KN: Tensor) -> int:
    """The walk over an answer to its last token; its first comes from the prompt's own forward pass."""
    num_steps, length = match_KN.shape
    start, steps = 1, 0
    while start < length:
        drafts = match_KN[:, start : start + num_steps].diagonal()
        start, steps = start + 1 + int(drafts.int().cumprod(dim=0).sum()), steps + 1
    return steps


def _answer_lengths(batch: Batch) -> list[int]:
    """Rows of each answer, in order; a conversation of several turns has several."""
    follows_N = batch.position_N.diff() == 1
    follows_N &= batch.sequence_N.diff() == 0
    starts = [0, *((~follows_N).nonzero().squeeze(1) + 1).tolist(), len(batch.position_N)]
    return [after - start for start, after in pairwise(starts)]


def _rollout(
    drafter: Drafter, target: FrozenTarget, batch: Batch, num_steps: int, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """(draft == answer token, bool [K, N]; sums over rows of each of `OF_DISTRIBUTIONS` [4, K]), on the CPU."""
    all_rows = roll_out(drafter, target, batch, num_steps)
    next_ids_N = batch.next_ids_N
    match_KN = torch.zeros(all_rows.hidden_KNH.shape[:2], dtype=torch.bool, device=target.device)
    sums_4K = torch.zeros(len(OF_DISTRIBUTIONS), num_steps, device=target.device)
    for rows, chunk in all_rows.chunks(chunk_rows):
        p_nV = target.distribution(chunk.last_hidden_NG, torch.float32)
        for i, hidden_nH in enumerate(chunk.hidden_KNH):
            head = drafter.lm_head.at(i)
            routed = chunk.route(head, i)
            drafts = head.propose(hidden_nH, i, 1, routed).token_ids_Tk.squeeze(1)
            match_KN[i, rows] = drafts == next_ids_N[rows]
            q_nS, ids = head.distribution(hidden_nH, i, routed)
            p_nS = p_nV if ids is None else p_nV[:, ids] if ids.dim() == 1 else p_nV.gather(1, ids)
            on_support_nS = p_nS * (head.candidates(hidden_nH, i, routed).logits_TS > NO_TOKEN / 2)
            mass_n1 = on_support_nS.sum(dim=-1, keepdim=True)
            apart_n = (on_support_nS / mass_n1.clamp(min=torch.finfo(torch.float32).tiny) - q_nS).abs().sum(dim=-1)
            found = torch.minimum(p_nS, q_nS), head.scored(hidden_nH, i, routed), mass_n1, 0.5 * apart_n
            sums_4K[:, i] += torch.stack([part.sum() for part in found])
    return match_KN.cpu(), sums_4K.cpu()
