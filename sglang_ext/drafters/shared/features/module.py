"""Attention over a rollout, and what a drafter of one decoder layer over features offers to training.

B = sequences, T = slots, S = slots of the first step, H = drafter hidden size, G = target hidden size, A = query heads,
K = key/value heads, D = head dimension.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters import base
from sglang_ext.drafters.layers import rotate
from sglang_ext.drafters.shared.features.config import FeatureConfig

Cache = list[tuple[Tensor, Tensor]]  # keys and values [B, T, A, D] of each step


class FeatureAttention(nn.Module):
    """`input_size`: of what queries, keys and values are made of."""

    def __init__(self, config: FeatureConfig, input_size: int) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(input_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BTI: Tensor, positions_BT: Tensor, cache: Cache) -> Tensor:
        """Attention of one step over inputs [B, T, input_size]; appends the step's keys and values to `cache`.

        Slot t sees the slots 0..t of the first step (true features) and slot t itself of every later step. The later
        steps may be of some of the first one's slots: `positions_BT`, t + i at slot t of step i, say which.
        """
        c = self.config
        B, T, _ = x_BTI.shape
        groups = c.num_attention_heads // c.num_key_value_heads
        q_BTAD = rotate(self.q_proj(x_BTI).view(B, T, -1, c.head_dim), positions_BT, c.rope)
        k_BTKD = rotate(self.k_proj(x_BTI).view(B, T, -1, c.head_dim), positions_BT, c.rope)
        v_BTKD = self.v_proj(x_BTI).view(B, T, -1, c.head_dim)
        cache.append((k_BTKD.repeat_interleave(groups, dim=2), v_BTKD.repeat_interleave(groups, dim=2)))

        (first_k, first_v), later = cache[0], cache[1:]
        if not later:
            out = F.scaled_dot_product_attention(
                q_BTAD.transpose(1, 2), first_k.transpose(1, 2), first_v.transpose(1, 2), is_causal=True
            )
            return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

        scale = c.head_dim**-0.5
        S = first_k.shape[1]
        slot_BT = positions_BT - len(later)
        is_later_BTS = torch.arange(S, device=q_BTAD.device) > slot_BT[..., None]
        scores_BATS = torch.einsum("btad,bsad->bats", q_BTAD, first_k) * scale
        scores_BATS = scores_BATS.masked_fill(is_later_BTS[:, None], float("-inf"))
        own_BATn = torch.stack([(q_BTAD * k).sum(-1).transpose(1, 2) * scale for k, _ in later], dim=-1)
        weights = torch.cat([scores_BATS, own_BATn], dim=-1).float().softmax(dim=-1).to(q_BTAD.dtype)
        out_BTAD = torch.einsum("bats,bsad->btad", weights[..., :S], first_v)
        for i, (_, v) in enumerate(later):
            out_BTAD = out_BTAD + weights[..., S + i].transpose(1, 2)[..., None] * v
        return self.o_proj(out_BTAD.reshape(B, T, -1))


class FeatureDrafter(base.Drafter, ABC):
    """A body of which step i reads at slot t the feature that stands for x_{t+i} and the embedding of x_{t+1+i}, and
    predicts x_{t+2+i}. The token embedding is the target's, frozen and not part of the drafter."""

    fc: nn.Linear

    @abstractmethod
    def fuse(self, states_BTG: Tensor) -> Tensor:
        """First feature [B, T, H] from the target's states that the family reads."""

    @abstractmethod
    def step(self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One pass of the layer: (hidden for the head [B, T, H], feature for the next step [B, T, H]).

        `positions_BT` is t + i at slot t of step i; `cache` starts empty and collects one entry a step.
        """
