"""How a SpecFormer drafter begins, and what its head reads along an answer. B = sequences, T = positions."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ext.drafters.layers import draw_matrices
from sglang_ext.drafters.shared.last_hidden.training import draft_steps, head_rows, read_carried
from sglang_ext.drafters.specformer.config import SpecFormerConfig, SpecFormerOptions, specformer_taps
from sglang_ext.drafters.specformer.module import SpecFormerDrafter
from sglang_ext.drafters.training import Batch, Rows, Steps, Target, layer_sizes

__all__ = ["carried", "config_for", "draft_steps", "head_rows", "init_body", "roll_out"]


def config_for(target: Target, options: SpecFormerOptions, recipe: Steps | None = None) -> SpecFormerConfig:
    sizes = layer_sizes(target, recipe) | {"tap_layers": specformer_taps(target.num_layers)}
    return SpecFormerConfig.from_options(options, sizes)


def init_body(drafter: SpecFormerDrafter, target: Target, probe: Batch, seed: int) -> None:
    """Every slot starts as the target's own last hidden state, and would propose what the target says next: where
    Medusa starts from, too."""
    last_hidden_rms = probe.rms(target.last_hidden(probe.ids_BT))
    generator = draw_matrices(drafter, seed)
    c = drafter.config
    with torch.no_grad():
        drafter.fc.weight[:, : -c.hidden_size] *= 0.1
        drafter.fc.weight[:, -c.hidden_size :] = torch.eye(c.hidden_size)
        if c.position_projection:
            drafter.position_proj.weight += torch.eye(c.hidden_size).repeat(c.positions, 1)
        # alone they must tell slots apart that are one vector of unit size; beside the projection they need not
        drafter.position_code.normal_(std=0.02 if c.position_projection else 1.0, generator=generator)
        drafter.norm.weight.fill_(last_hidden_rms)


def carried(drafter: SpecFormerDrafter, target: Target, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What the slots of each token are made of [B, T, H], in its body's dtype, and the target's last hidden state
    [B, T, G]."""
    taps, last_hidden = target.features(ids_BT, drafter.config.tap_layers)
    return drafter.context(taps.to(drafter.body_dtype)), last_hidden


def roll_out(drafter: SpecFormerDrafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    return read_carried(drafter, target, batch, *carried(drafter, target, batch.ids_BT), num_steps)
