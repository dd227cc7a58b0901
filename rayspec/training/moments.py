"""Statistics of what a drafter's head meets on the target's answers; heads that factor the LM head start from them.

H = drafter hidden size, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.training import Batch

SEQUENCES = 128  # thousands of rows, some ten times the hidden size
BATCH = 8
BATCH_STATES = 1024  # kept of a batch
CHUNK_ROWS = 512  # whose target distributions are held at once


@torch.no_grad()
def head_moments(
    target: FrozenTarget, answers: AnswerSet, drafter: Drafter | None = None, num_steps: int = 1
) -> dict[str, Tensor]:
    """`hidden_moment` [H, H], the second moment E[h h^T] of the states that the head reads, and `token_share` [V], the
    mean of the target's distributions, both float32, over the first answers.

    The states are those of a trained `drafter` along its rollout of `num_steps`, of which some come along as `states`
    [N, H]; without one the target's own last hidden states, which a new drafter starts near and learns to foresee. All
    that is returned is on the CPU.
    """
    moment_HH = token_share_V = torch.zeros((), device=target.device)
    kept: list[Tensor] = []
    states = rows = 0
    batches = torch.arange(min(SEQUENCES, len(answers))).split(BATCH)
    for indices in tqdm(batches, desc="what the head meets", unit="batch", leave=False):
        batch = Batch.of(answers, indices, target.device)
        if drafter is None:
            last_NH = target.last_hidden(batch.ids_BT)[batch.sequence_N, batch.position_N]
            hidden_RH = last_NH.float()
        else:
            rolled = roll_out(drafter, target, batch, num_steps)
            last_NH, hidden_RH = rolled.last_hidden_NG, rolled.hidden_KNH.flatten(0, 1).float()
            kept.append(hidden_RH[:: -(-len(hidden_RH) // BATCH_STATES)])
        moment_HH = moment_HH + hidden_RH.T @ hidden_RH
        for chunk_nH in last_NH.split(CHUNK_ROWS):
            token_share_V = token_share_V + target.distribution(chunk_nH, torch.float32).sum(dim=0)
        states, rows = states + len(hidden_RH), rows + len(last_NH)
    met = {"hidden_moment": moment_HH / states, "token_share": token_share_V / rows}
    met |= {"states": torch.cat(kept)} if kept else {}
    return {name: tensor.cpu() for name, tensor in met.items()}
