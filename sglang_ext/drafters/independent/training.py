"""How an independent drafter begins, from rows of the target's LM head in a few directions, and what its head reads.

V = vocabulary, G = target hidden size, H = drafter hidden size, N = answer positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.independent.config import IndependentConfig, IndependentOptions
from sglang_ext.drafters.independent.module import IndependentDrafter
from sglang_ext.drafters.training import Batch, Choose, Rows, Steps, Target, check_no_layer


def config_for(target: Target, options: IndependentOptions, recipe: Steps | None = None) -> IndependentConfig:
    """Raises ValueError also for a drafter that is wider than the target."""
    check_no_layer(options.kind, recipe, "set drafter.intermediate_size")
    config = IndependentConfig.from_options(options, target.sizes())
    _check_width(config.hidden_size, target.sizes()["hidden_size"])
    return config


def draft_steps(config: IndependentConfig, recipe: Steps) -> int:
    """One: every other is the same pass."""
    return 1


def head_rows(target: Target, config: IndependentConfig) -> Tensor:
    return principal_rows(target.head_VG.cpu().float(), config.hidden_size)


def _check_width(hidden_size: int, target_hidden: int) -> None:
    if hidden_size > target_hidden:
        raise ValueError(
            f"drafter.hidden_size must be at most the target's ({target_hidden}), whose LM head's rows a new "
            f"drafter takes over, got {hidden_size}"
        )


def principal_rows(head_VG: Tensor, hidden_size: int) -> Tensor:
    """The rows of an LM head in their H main directions, [V, H]: what of it a narrower drafter can hold.

    Raises ValueError where there are fewer than H.
    """
    _check_width(hidden_size, head_VG.shape[1])
    directions_GG = torch.linalg.eigh(head_VG.T @ head_VG).eigenvectors  # the main ones last
    return head_VG @ directions_GG[:, -hidden_size:]


def init_body(drafter: IndependentDrafter, target: Target, probe: Batch, seed: int) -> None:
    """The embedding is the head's rows, turned by a random rotation: similar tokens start near each other, and none
    predicts itself."""
    rows_VH = head_rows(target, drafter.config)
    generator = torch.Generator().manual_seed(seed)
    for layer in drafter.model.layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
    H = rows_VH.shape[1]
    rotation_HH = torch.linalg.qr(torch.randn(H, H, generator=generator)).Q
    with torch.no_grad():
        drafter.model.embed_tokens.weight.copy_(rows_VH @ rotation_HH / rows_VH.square().mean().sqrt())


def roll_out(drafter: IndependentDrafter, target: Target, batch: Batch, num_steps: int) -> Rows:
    """x_{p+1} is predicted from x_1 .. x_p at every step: a drafted token is read as any other."""
    hidden_BTH = drafter(batch.ids_BT[:, 1:-1])
    embed_NH = drafter.embed(batch.at_answers(batch.ids_BT)).detach()
    embed_KNH = embed_NH.expand(num_steps, -1, -1)
    return Rows(
        hidden_BTH[batch.sequence_N, batch.position_N - 1].expand(num_steps, -1, -1),
        embed_KNH if drafter.lm_head.routes else None,
        embed_KNH,
        batch.at_answers(target.last_hidden(batch.ids_BT)),
        batch.next_ids_N,
    )


def write(
    drafter: IndependentDrafter, target: Target, ids_BT: Tensor, length_B: Tensor, num_tokens: int, choose: Choose
) -> Tensor:
    """Every token by a pass over the whole text: the model is small and keeps no cache here."""
    text_BT = F.pad(ids_BT, (0, num_tokens))
    rows_B = torch.arange(len(ids_BT), device=ids_BT.device)
    for step in range(num_tokens):
        last_B = length_B - 1 + step
        hidden_BTH = drafter(text_BT[:, 1 : int(last_B.max()) + 1])
        embed_BH = drafter.embed(text_BT[rows_B, last_B])
        text_BT[rows_B, last_B + 1] = choose(hidden_BTH[rows_B, last_B - 1], embed_BH, embed_BH)
    return text_BT.take_along_dim(length_B[:, None] + torch.arange(num_tokens, device=ids_BT.device), dim=1)
