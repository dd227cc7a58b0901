"""How an EAGLE drafter begins, and its loss on features.

B = sequences, T = positions, N = answer positions of the batch, K = rollout steps, H = hidden size.

EAGLE trains one step on the target's own features; HASS (Zhang et al. 2024, arXiv 2408.15766) goes on for some steps on
the drafter's, which is the same rollout with `recipe.ttt_steps` above 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.drafters.eagle.config import EagleConfig, EagleOptions
from sglang_ext.drafters.eagle.module import EagleDrafter
from sglang_ext.drafters.layers import draw_matrices
from sglang_ext.drafters.shared.features.training import draft_steps, head_rows, read_rollout, write_on
from sglang_ext.drafters.training import Batch, Choose, Rows, Steps, Target, layer_sizes

__all__ = ["config_for", "draft_steps", "head_rows", "init_body", "roll_out", "write"]

FEATURE_WEIGHT = 10.0  # EAGLE's loss is 1.0 of the features and 0.1 of the head; here the head's share is 1
NOISE = 0.1  # largest absolute value of what is added to the features that training reads; EAGLE-1's U(-0.1, 0.1)


def config_for(target: Target, options: EagleOptions, recipe: Steps | None = None) -> EagleConfig:
    return EagleConfig.from_options(options, layer_sizes(target, recipe))


def init_body(drafter: EagleDrafter, target: Target, probe: Batch, seed: int) -> None:
    """Every slot starts near the feature that it reads. Embeddings come in at the features' size, of which a trained
    target's are some hundredth part; queries and keys, which no norm comes before, as if it were 1."""
    features_BTH = target.last_hidden(probe.ids_BT)
    size, embed_size = probe.rms(features_BTH), probe.rms(target.embed(probe.ids_BT))
    draw_matrices(drafter, seed)
    H, attention = drafter.config.hidden_size, drafter.layers[0].self_attn
    with torch.no_grad():
        drafter.fc.weight[:, :H] *= size / embed_size
        drafter.fc.weight[:, H:] = torch.eye(H)
        drafter.fc.bias.zero_()
        attention.q_proj.weight /= size
        attention.k_proj.weight /= size


def roll_out(drafter: EagleDrafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    """While the body is trained, from features with noise, and with the loss of its own: how far each state is from the
    target's feature."""
    last_hidden_BTH = target.last_hidden(batch.ids_BT)
    if not (torch.is_grad_enabled() and drafter.fc.weight.requires_grad):
        return read_rollout(drafter, target, batch, last_hidden_BTH, last_hidden_BTH, num_steps)
    noisy_BTH = last_hidden_BTH + _noise(batch, last_hidden_BTH)
    rows = read_rollout(drafter, target, batch, noisy_BTH, last_hidden_BTH, num_steps)
    wanted_KNH = rows.last_hidden_NG.float().expand(num_steps, -1, -1)
    apart_KNH = F.smooth_l1_loss(rows.hidden_KNH.float(), wanted_KNH, reduction="none")
    return rows._replace(body_loss_KN=FEATURE_WEIGHT * apart_KNH.mean(dim=-1))


def _noise(batch: Batch, like_BTH: Tensor) -> Tensor:
    """Drawn for each sequence by its number and the step: a resumed run meets the same, another step other noise, and
    an update in pieces that of the whole, since a longer row begins as a shorter one."""
    B, T, H = like_BTH.shape
    assert len(batch.numbers) == B, "Batch.of numbers the sequences"
    rows = [np.random.default_rng([batch.step, n]).random((T, H), np.float32) for n in batch.numbers]
    return torch.from_numpy(NOISE * (2 * np.stack(rows) - 1)).to(like_BTH.device, like_BTH.dtype)


def write(
    drafter: EagleDrafter, target: Target, ids_BT: Tensor, length_B: Tensor, num_tokens: int, choose: Choose
) -> Tensor:
    return write_on(drafter, target, ids_BT, length_B, target.last_hidden(ids_BT), num_tokens, choose)
