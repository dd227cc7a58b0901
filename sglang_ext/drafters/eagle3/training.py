"""How an EAGLE-3 drafter begins, and its rollout: training-time test."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.drafters.eagle3.config import Eagle3Config, Eagle3Options
from sglang_ext.drafters.eagle3.module import Eagle3Drafter
from sglang_ext.drafters.layers import draw_matrices
from sglang_ext.drafters.shared.features.training import (
    draft_steps,
    head_rows,
    read_rollout,
    unroll,
    write_on,
)
from sglang_ext.drafters.training import Batch, Choose, Rows, Steps, Target, layer_sizes

__all__ = ["config_for", "draft_steps", "head_rows", "init_body", "roll_out", "unroll", "write"]


def config_for(target: Target, options: Eagle3Options, recipe: Steps | None = None) -> Eagle3Config:
    return Eagle3Config.from_options(options, layer_sizes(target, recipe) | {"tap_layers": target.taps})


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


def roll_out(drafter: Eagle3Drafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    taps, last_hidden = target.features(batch.ids_BT, drafter.config.tap_layers or target.taps)
    return read_rollout(drafter, target, batch, taps, last_hidden, num_steps)


def write(
    drafter: Eagle3Drafter, target: Target, ids_BT: Tensor, length_B: Tensor, num_tokens: int, choose: Choose
) -> Tensor:
    taps, _ = target.features(ids_BT, drafter.config.tap_layers or target.taps)
    return write_on(drafter, target, ids_BT, length_B, taps, num_tokens, choose)
