"""How a drafter begins that drafts from one vector a request, and what its head reads along an answer.

B = sequences, T = positions, N = answer positions of the batch, H = hidden size of the target, d = tokens of a path.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from sglang_ext.drafters.shared.last_hidden.config import LastHiddenConfig
from sglang_ext.drafters.shared.last_hidden.module import LastHiddenDrafter
from sglang_ext.drafters.training import Batch, Rows, Steps, Target

ConfigT = TypeVar("ConfigT", bound=LastHiddenConfig)


def draft_steps(config: LastHiddenConfig, recipe: Steps) -> int:
    """All positions, which have parameters each."""
    return config.positions


def head_rows(target: Target, config: LastHiddenConfig) -> Tensor:
    return target.head_VG.cpu().float()


def init_body(drafter: LastHiddenDrafter, target: Target, probe: Batch, seed: int) -> None:
    """Initialise the body as the module begins: it would propose what the target says next."""


def carried(drafter: LastHiddenDrafter, target: Target, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The vector [B, T, H] that the drafter would draft from after each token, in its body's dtype, and the target's
    last hidden state [B, T, G]."""
    last_hidden = target.last_hidden(ids_BT)
    return last_hidden.to(drafter.body_dtype), last_hidden


def roll_out(drafter: LastHiddenDrafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    return read_carried(drafter, target, batch, *carried(drafter, target, batch.ids_BT), num_steps)


def read_carried(
    drafter: LastHiddenDrafter,
    target: Target,
    batch: Batch,
    carried_BTH: Tensor,
    last_hidden_BTG: Tensor,
    num_steps: int,
) -> Rows:
    """Position i predicts x_{p+1} from the vector after x_{p-1-i} and, where it reads the path, x_{p-i} .. x_p."""
    own_BTKH = drafter.begin(carried_BTH.flatten(0, 1), num_steps).unflatten(0, carried_BTH.shape[:2])
    states, features, embeds = [], [], []
    for i in range(num_steps):
        before_N = batch.position_N - 1 - i
        path_Nd = batch.position_N[:, None] + torch.arange(-i, 1, device=batch.position_N.device)
        path_NdH = target.embed(batch.ids_BT[batch.sequence_N[:, None], path_Nd]).to(carried_BTH.dtype)
        own_NH = own_BTKH[batch.sequence_N, before_N, i]
        states.append(drafter.state(i, own_NH, path_NdH if drafter.reads_path else None))
        features.append(carried_BTH[batch.sequence_N, before_N].detach())
        embeds.append(path_NdH[:, -1 if drafter.reads_path else 0])  # what is known when the position is drafted
    return Rows(
        torch.stack(states),
        torch.stack(features) if drafter.lm_head.routes else None,
        torch.stack(embeds),
        batch.at_answers(last_hidden_BTG),
        batch.next_ids_N,
    )
