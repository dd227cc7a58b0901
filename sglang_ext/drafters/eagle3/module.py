"""The EAGLE-3 drafter as a plain torch module (Li et al. 2025): one decoder layer over fused target features.

B = sequences, T = slots, H = drafter hidden size, G = target hidden size, A = query heads, K = key/value heads,
D = head dimension.

Slot t holds the target feature of token x_t and the embedding of x_{t+1}; its output predicts x_{t+2}. The token
embedding is the target's, frozen and not part of the drafter. State-dict names are those of stock EAGLE-3 checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters import base
from sglang_ext.drafters.eagle3.config import Eagle3Config
from sglang_ext.drafters.layers import RMSNorm, SwiGLU, rotate
from sglang_ext.heads import DraftHead
from sglang_ext.trees import CandidateTree


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BT2H: Tensor, positions_BT: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one training-time-test step; appends this step's (k, v) [B, T, A, D] to `cache`.

        Slot t sees the slots 0..t of the first step (true features) and slot t itself of every later step.
        """
        c = self.config
        B, T, _ = x_BT2H.shape
        groups = c.num_attention_heads // c.num_key_value_heads
        q_BTAD = rotate(self.q_proj(x_BT2H).view(B, T, -1, c.head_dim), positions_BT, c.rope)
        k_BTKD = rotate(self.k_proj(x_BT2H).view(B, T, -1, c.head_dim), positions_BT, c.rope)
        v_BTKD = self.v_proj(x_BT2H).view(B, T, -1, c.head_dim)
        cache.append((k_BTKD.repeat_interleave(groups, dim=2), v_BTKD.repeat_interleave(groups, dim=2)))

        (first_k, first_v), later = cache[0], cache[1:]
        if not later:
            out = F.scaled_dot_product_attention(
                q_BTAD.transpose(1, 2), first_k.transpose(1, 2), first_v.transpose(1, 2), is_causal=True
            )
            return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

        scale = c.head_dim**-0.5
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=q_BTAD.device).tril()
        scores_BATT = torch.einsum("btad,bsad->bats", q_BTAD, first_k) * scale
        scores_BATT = scores_BATT.masked_fill(~causal_TT, float("-inf"))
        own_BATn = torch.stack([(q_BTAD * k).sum(-1).transpose(1, 2) * scale for k, _ in later], dim=-1)
        weights = torch.cat([scores_BATT, own_BATn], dim=-1).float().softmax(dim=-1).to(q_BTAD.dtype)
        out_BTAD = torch.einsum("bats,bsad->btad", weights[..., :T], first_v)
        for i, (_, v) in enumerate(later):
            out_BTAD = out_BTAD + weights[..., T + i].transpose(1, 2)[..., None] * v
        return self.o_proj(out_BTAD.reshape(B, T, -1))


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x_BT2H = torch.cat([self.input_layernorm(embed_BTH), self.hidden_norm(feature_BTH)], dim=-1)
        x_BTH = feature_BTH + self.self_attn(x_BT2H, positions_BT, cache)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Eagle3Drafter(base.Drafter):
    """The drafter's body (`fc`, `midlayer`, `norm`) and its head (`lm_head`). `draft_tree` chooses what is verified of
    the tree that it expands."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, head: DraftHead, draft_tree: CandidateTree | None = None) -> None:
        super().__init__(config, head, draft_tree)
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, taps_BTG: Tensor) -> Tensor:
        """First feature [B, T, H] from the concatenated taps [B, T, taps * G]."""
        return self.fc(taps_BTG)

    def step(
        self,
        embed_BTH: Tensor,
        feature_BTH: Tensor,
        positions_BT: Tensor,
        cache: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """One pass of the layer: (hidden for the head [B, T, H], feature for the next step [B, T, H]).

        `positions_BT` is t + i at slot t of step i; `cache` starts empty and collects one (k, v) a step.
        """
        feature_BTH = self.midlayer(embed_BTH, feature_BTH, positions_BT, cache)
        return self.norm(feature_BTH), feature_BTH


Drafter = Eagle3Drafter
