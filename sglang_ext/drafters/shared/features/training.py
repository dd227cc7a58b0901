"""The rollout of a drafter over features, and what its head reads along an answer.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = hidden size, G = target hidden
size.

Step i predicts x_{p+1} from slot t = p - 1 - i, whose feature is x_t's, and whose input token at that step is x_p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.drafters.shared.features.config import FeatureConfig
from sglang_ext.drafters.shared.features.module import Cache, FeatureDrafter
from sglang_ext.drafters.training import Batch, Choose, Rows, Steps, Target


def draft_steps(config: FeatureConfig, recipe: Steps) -> int:
    return recipe.ttt_steps


def head_rows(target: Target, config: FeatureConfig) -> Tensor:
    return target.head_VG.cpu().float()


class Unrolled(NamedTuple):
    """For each rollout step, the hidden state for the head and the feature that entered the layer, [B, T - 1, H]."""

    hiddens: list[Tensor]
    features: list[Tensor]


def unroll(drafter: FeatureDrafter, target: Target, ids_BT: Tensor, states_BTG: Tensor, num_steps: int) -> Unrolled:
    """Slot t of step i predicts x_{t+2+i}, from the states [B, T, G] that the drafter fuses into its first feature.

    Embeddings past the end are those of token 0; no row reads such a slot.
    """
    B, T = ids_BT.shape
    shifted = F.pad(ids_BT[:, 1:], (0, num_steps - 1))
    feature = drafter.fuse(states_BTG[:, :-1].to(drafter.fc.weight.dtype))
    positions_1T = torch.arange(T - 1, device=ids_BT.device)[None]
    cache: Cache = []
    unrolled = Unrolled([], [])
    for i in range(num_steps):
        unrolled.features.append(feature)
        embed = target.embed(shifted[:, i : i + T - 1]).to(feature.dtype)
        hidden, feature = drafter.step(embed, feature, (positions_1T + i).expand(B, -1), cache)
        unrolled.hiddens.append(hidden)
    return unrolled


def read_rollout(
    drafter: FeatureDrafter,
    target: Target,
    batch: Batch,
    states_BTG: Tensor,
    last_hidden_BTG: Tensor,
    num_steps: int,
) -> Rows:
    """The rows of `unroll`; `last_hidden_BTG` is the target's last hidden state."""
    unrolled = unroll(drafter, target, batch.ids_BT, states_BTG, num_steps)

    def gather(states: list[Tensor]) -> Tensor:
        return torch.stack([h[batch.sequence_N, batch.position_N - 1 - i] for i, h in enumerate(states)])

    return Rows(
        gather(unrolled.hiddens),
        gather([f.detach() for f in unrolled.features]) if drafter.lm_head.routes else None,
        # the input token at every step is the one before the predicted one
        target.embed(batch.at_answers(batch.ids_BT)).expand(num_steps, -1, -1),
        batch.at_answers(last_hidden_BTG),
        batch.next_ids_N,
    )


def write_on(
    drafter: FeatureDrafter,
    target: Target,
    ids_BT: Tensor,
    length_B: Tensor,
    states_BTG: Tensor,
    num_tokens: int,
    choose: Choose,
) -> Tensor:
    """int64 [B, num_tokens], after the first `length_B` tokens of each row, of the states [B, T, G] along these.

    The first step reads every slot of the given tokens. From then on slot length - 2 alone is left, which sees those up
    to itself and its own drafts.
    """
    feature = drafter.fuse(states_BTG[:, :-1].to(drafter.fc.weight.dtype))
    embed = target.embed(ids_BT[:, 1:]).to(feature.dtype)
    positions_BT = torch.arange(feature.shape[1], device=ids_BT.device).expand(len(ids_BT), -1)
    slot_B1 = (length_B - 2)[:, None]
    cache: Cache = []
    written: list[Tensor] = []

    def at_slot(states_BTH: Tensor) -> Tensor:
        return states_BTH.take_along_dim(slot_B1[..., None], dim=1)

    for step in range(num_tokens):
        hidden, after = drafter.step(embed, feature, positions_BT, cache)
        if step == 0:
            hidden, after, embed, feature = (at_slot(x) for x in (hidden, after, embed, feature))
            positions_BT = slot_B1
        written.append(choose(hidden[:, 0], embed[:, 0], feature[:, 0]))
        feature, embed = after, target.embed(written[-1])[:, None].to(after.dtype)
        positions_BT = positions_BT + 1
    return torch.stack(written, dim=1)
