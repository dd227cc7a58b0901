"""How a Hydra drafter begins, and what its head reads along an answer. B = sequences, T = positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_ext.drafters.hydra.config import HydraConfig, HydraOptions
from sglang_ext.drafters.hydra.module import HydraDrafter
from sglang_ext.drafters.layers import draw_matrices
from sglang_ext.drafters.shared.last_hidden import training as last_hidden
from sglang_ext.drafters.shared.last_hidden.training import draft_steps, head_rows, read_carried
from sglang_ext.drafters.training import Batch, Rows, Steps, Target, check_no_layer, layer_sizes

__all__ = ["carried", "config_for", "draft_steps", "head_rows", "init_body", "roll_out"]


def config_for(target: Target, options: HydraOptions, recipe: Steps | None = None) -> HydraConfig:
    if options.prefix_layer:
        return HydraConfig.from_options(options, layer_sizes(target, recipe))
    check_no_layer(options.kind, recipe, "leave it out, or set drafter.prefix_layer")
    return HydraConfig.from_options(options, target.sizes())


def init_body(drafter: HydraDrafter, target: Target, probe: Batch, seed: int) -> None:
    """Initialise the body as the module begins. A prefix layer has matrices that are drawn, behind those that are zero,
    and a last norm that brings h to the size at which the head is used to it."""
    if not drafter.config.prefix_layer:
        return
    last_hidden_rms = probe.rms(target.last_hidden(probe.ids_BT))
    assert drafter.context_attn is not None, "SGLang serves it"
    draw_matrices(nn.ModuleList([drafter.context_attn, drafter.mlp]), seed)
    with torch.no_grad():
        drafter.context_attn.o_proj.weight.zero_()
        drafter.mlp.down_proj.weight.zero_()
        drafter.norm.weight.fill_(last_hidden_rms)


def carried(drafter: HydraDrafter, target: Target, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """What would be drafted from after each token [B, T, H], in the drafter's dtype, and the target's last hidden state
    [B, T, G]."""
    hidden_BTH, last_hidden_BTG = last_hidden.carried(drafter, target, ids_BT)
    return drafter.context(hidden_BTH) if drafter.config.prefix_layer else hidden_BTH, last_hidden_BTG


def roll_out(drafter: HydraDrafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    return read_carried(drafter, target, batch, *carried(drafter, target, batch.ids_BT), num_steps)
