"""The independent drafter at step 0: rows of the target's LM head in a few directions, and layers from the seed.

V = vocabulary, G = target hidden size, H = drafter hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.independent import IndependentConfig, IndependentDrafter
from sglang_ext.heads import head_from_target


def new_independent(
    target: FrozenTarget, head: DrafterEntry, seed: int, artifacts: Mapping[str, Tensor]
) -> IndependentDrafter:
    """Head and embedding made from the target's head, layers from the seed. Raises ValueError for a bad head, and for a
    drafter that is wider than the target."""
    config = target.options_config(IndependentConfig, head.drafter_options)
    rows_VH = principal_rows(target.head_VG.float(), config.hidden_size)
    drafter = IndependentDrafter(config, config.heads(lambda: head_from_target(head.draft_head, rows_VH, artifacts)))
    init_independent(drafter, rows_VH, seed)
    return drafter


def check_width(hidden_size: int, target_hidden: int) -> None:
    """Raise ValueError for a drafter that is wider than the target."""
    if hidden_size > target_hidden:
        raise ValueError(
            f"drafter.hidden_size must be at most the target's ({target_hidden}), whose LM head's rows a new "
            f"drafter takes over, got {hidden_size}"
        )


def principal_rows(head_VG: Tensor, hidden_size: int) -> Tensor:
    """The rows of an LM head in their H main directions, [V, H]: what of it a narrower drafter can hold.

    Raises ValueError where there are fewer than H.
    """
    check_width(hidden_size, head_VG.shape[1])
    directions_GG = torch.linalg.eigh(head_VG.T @ head_VG).eigenvectors  # the main ones last
    return head_VG @ directions_GG[:, -hidden_size:]


def init_independent(drafter: IndependentDrafter, rows_VH: Tensor, seed: int) -> None:
    """Initialise everything but the head; one seed gives one body, whatever the head.

    The embedding is the head's rows, turned by a random rotation: similar tokens start near each other, and none
    predicts itself.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in drafter.model.layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
    H = rows_VH.shape[1]
    rotation_HH = torch.linalg.qr(torch.randn(H, H, generator=generator)).Q
    with torch.no_grad():
        drafter.model.embed_tokens.weight.copy_(rows_VH @ rotation_HH / rows_VH.square().mean().sqrt())
