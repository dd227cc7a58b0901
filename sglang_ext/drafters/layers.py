"""Layers that the bodies of drafters are made of.

B = sequences, T = slots, H = hidden size, A = query heads, D = head dimension.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.rope import Rope

TABLES = ("lm_head.", "model.embed_tokens.")  # a row for each token


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a drafter's parameter is a matrix of its body; tables of tokens and codes of positions are rows, not a
    map."""
    return parameter.ndim == 2 and name.endswith(".weight") and not name.startswith(TABLES)


def draw_matrices(body: nn.Module, seed: int) -> torch.Generator:
    """Draw the matrices of a drafter's body, with a standard deviation of 0.02; returns the generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in body.named_parameters():
        if is_matrix(name, parameter):
            nn.init.normal_(parameter, std=0.02, generator=generator)
    return generator


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x_BTAD: Tensor, positions_BT: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding over half-split dimensions (the Llama layout), computed in float32."""
    inv_freq, scale = rope.frequencies(x_BTAD.shape[-1])
    # a copy that nobody waits for: this runs twice in each step of a rollout
    angle = positions_BT[..., None, None].float() * inv_freq.to(x_BTAD.device, non_blocking=True)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    a, b = x_BTAD.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BTAD.dtype)


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttentionShape(Protocol):
    """What a drafter's config must have."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> Rope: ...


class Attention(nn.Module):
    """Names of the projections are those of Hugging Face's Llama."""

    def __init__(self, config: AttentionShape) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BTH: Tensor, *, causal: bool, positions_BT: Tensor | None = None) -> Tensor:
        """Rotary where positions are given."""
        B, T, _ = x_BTH.shape
        c = self.config
        q, k, v = (p(x_BTH).view(B, T, -1, c.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        if positions_BT is not None:
            q, k = rotate(q, positions_BT, c.rope), rotate(k, positions_BT, c.rope)
        q, k, v = (x_BTAD.transpose(1, 2) for x_BTAD in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
