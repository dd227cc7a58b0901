"""SpecFormer as a plain torch module: every draft position from one pass over the target's features.

I   = W_D norm(taps)                 the taps' norm is over each tap alone (grouped RMSNorm)
I_D = I + MSA(norm(I))               causal over the context, rotary, with a cache of its own
D_i = W_i norm(I_D) + b_i            a matrix and a learned position code for each draft position
E   = D + SA(norm(D))                over the positions of one draft, bidirectional, not rotary
E   = E + SwiGLU(norm(E))            the head reads norm(E_i)

B = sequences, T = tokens, N = rows, H = hidden size of the target, K = draft positions ("slots"), J = those asked for.

Slot i of token x_t predicts x_{t+2+i}: the target has named x_{t+1} by then. In decoding the context layer runs over
what the target has just verified, and the slots of the last accepted token are the next draft, so that a step has one
drafter call however long the draft.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rayspec_kernels.grouped_rmsnorm import grouped_rmsnorm
from sglang_ext.drafters.layers import Attention, RMSNorm, SwiGLU
from sglang_ext.drafters.shared.last_hidden.module import Context, LastHiddenDrafter
from sglang_ext.drafters.specformer.config import SpecFormerConfig


class SpecFormerDrafter(Context, LastHiddenDrafter):
    """What a request carries between steps is I_D of its last accepted token; `begin` makes the slots of it."""

    config: SpecFormerConfig
    reads_path = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        H, K, width = c.hidden_size, c.positions, len(c.tap_layers) * c.hidden_size
        norm: Callable[[], RMSNorm] = lambda: RMSNorm(H, c.rms_norm_eps)  # noqa: E731
        self.tap_norm = RMSNorm(width, c.rms_norm_eps)  # its weight; the statistics are each tap's
        self.fc = nn.Linear(width, H, bias=False)
        self.context_norm = norm()
        self.context_attn = Attention(c)
        self.position_norm = norm()
        if c.position_projection:
            self.position_proj = nn.Linear(H, K * H, bias=False)
        self.position_code = nn.Parameter(torch.zeros(K, H))
        self.slot_norm = norm()
        self.slot_attn = Attention(c)
        self.mlp_norm = norm()
        self.mlp = SwiGLU(H, c.intermediate_size)
        self.norm = norm()

    def fuse(self, features_NG: Tensor) -> Tensor:
        """I [N, H] of the concatenated taps [N, taps * H]."""
        weight_G = self.tap_norm.weight.to(features_NG.dtype)
        groups = len(self.config.tap_layers)
        return self.fc(grouped_rmsnorm(features_NG, weight_G, groups, self.config.rms_norm_eps))

    def slots(self, context_NH: Tensor, num_slots: int | None = None) -> Tensor:
        """norm(E) [N, J, H] of the first `num_slots` (None: all) slots of each row's draft."""
        c = self.config
        N, H = context_NH.shape
        x_NH = self.position_norm(context_NH)
        D_NKH = self.position_proj(x_NH).view(N, c.positions, H) if c.position_projection else x_NH[:, None]
        D_NKH = D_NKH + self.position_code.to(D_NKH.dtype)
        E_NKH = D_NKH + self.slot_attn(self.slot_norm(D_NKH), causal=c.causal)
        E_NJH = E_NKH[:, :num_slots]
        return self.norm(E_NJH + self.mlp(self.mlp_norm(E_NJH)))

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor:
        return self.slots(hidden_TH, num_steps)

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        return hidden_TH

    def parts(self, step: int) -> list[nn.Module]:
        """The SwiGLU, which alone runs for no more slots than are asked for."""
        return [self.mlp]


Drafter = SpecFormerDrafter
