"""An attention layer as wide as a config says, over whole sequences.

B = sequences, T = slots, H = hidden size, A = query heads, D = head dimension.
"""

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.eagle3 import rotate


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
    def rope_theta(self) -> float: ...


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
            q, k = rotate(q, positions_BT, c.rope_theta), rotate(k, positions_BT, c.rope_theta)
        q, k, v = (x_BTAD.transpose(1, 2) for x_BTAD in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
