"""How an EAGLE-3 drafter begins, and its rollout: training-time test.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = hidden size.

Step i predicts x_{p+1} from slot t = p - 1 - i, whose feature is x_t's, and whose input token at that step is x_p.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.drafters.eagle3.config import Eagle3Config
from sglang_ext.drafters.eagle3.module import Eagle3Drafter
from sglang_ext.drafters.layers import draw_matrices
from sglang_ext.drafters.training import Batch, Rows, Steps, Target


def config_for(target: Target, options: Mapping[str, Any], recipe: Steps | None = None) -> Eagle3Config:
    """A layer shaped like one of the target's, but for an `intermediate_size` of the recipe."""
    own = None if recipe is None else recipe.intermediate_size
    sizes = target.sizes() | {"tap_layers": target.taps, "rope": target.rope.to_json()}
    return Eagle3Config.from_options(options, sizes | ({} if own is None else {"intermediate_size": own}))


def draft_steps(config: Eagle3Config, recipe: Steps) -> int:
    return recipe.ttt_steps


def head_rows(target: Target, config: Eagle3Config) -> Tensor:
    return target.head_VG.cpu().float()


def init_body(drafter: Eagle3Drafter, target: Target, probe: Batch, seed: int) -> None:
    """The first feature is the deepest tap, the nearest to what the head reads, brought to unit size: the residual
    stream of a trained target is some hundred times larger than its embeddings, and at its own size the layer could not
    move it within a short training. The norm before the head is the target's own, so that a head made from the target's
    sees the scale it knows.
    """
    H = drafter.config.hidden_size
    taps, _ = target.features(probe.ids_BT, target.taps)
    draw_matrices(drafter, seed)
    with torch.no_grad():
        drafter.fc.weight[:, :-H] *= 0.1
        drafter.fc.weight[:, -H:] = torch.eye(H)
        drafter.fc.weight /= probe.rms(taps[..., -H:])
        drafter.norm.weight.copy_(target.final_norm_G.float())


class Unrolled(NamedTuple):
    """Of each rollout step: the hidden state for the head, and the feature that entered the layer, [B, T - 1, H]."""

    hiddens: list[Tensor]
    features: list[Tensor]


def unroll(drafter: Eagle3Drafter, target: Target, ids_BT: Tensor, taps: Tensor, num_steps: int) -> Unrolled:
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


def roll_out(drafter: Eagle3Drafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    taps, last_hidden = target.features(batch.ids_BT, drafter.config.tap_layers or target.taps)
    unrolled = unroll(drafter, target, batch.ids_BT, taps, num_steps)

    def gather(states: list[Tensor]) -> Tensor:
        return torch.stack([h[batch.sequence_N, batch.position_N - 1 - i] for i, h in enumerate(states)])

    return Rows(
        gather(unrolled.hiddens),
        gather([f.detach() for f in unrolled.features]) if drafter.lm_head.routes else None,
        # the input token at every step is the one before the predicted one
        target.embed(batch.at_answers(batch.ids_BT)).expand(num_steps, -1, -1),
        batch.at_answers(last_hidden),
        batch.next_ids_N,
    )
