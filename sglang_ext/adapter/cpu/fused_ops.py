"""Norm, rotary embedding, an activation and capped logits of the CPU platform (`patches`).

On a small model a step is hundreds of operations of microseconds, so fewer of them is faster; results are the same to
the bit in float32. Variants that the demo path does not have go to SGLang's `forward_native`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from sglang_ext.adapter.cpu.contracts import demands


def rms_norm_forward(
    norm: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
) -> Any:
    plain = x.dtype == torch.float32 and norm.variance_size_override is None and norm.override_orig_dtype is None
    if not plain or post_residual_addition is not None:
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is not None:
        x = x + residual
    out = rms_norm(x, (norm.hidden_size,), norm.weight, norm.variance_epsilon)
    return out if residual is None else (out, x)


def rotary_forward(
    rotary: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[Tensor, Tensor]:
    """Rotates query [T, A * D] and key [T, K * D] together."""
    whole_heads = rotary.is_neox_style and rotary.rotary_dim == rotary.head_size
    if not whole_heads or offsets is not None or hasattr(rotary, "sin_cos_cache"):
        return rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    D = rotary.head_size
    both_TAD = torch.cat([query.view(-1, query.shape[-1] // D, D), key.view(-1, key.shape[-1] // D, D)], dim=1)
    cos, sin = rotary.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype).unsqueeze(1).chunk(2, dim=-1)
    a, b = both_TAD.chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    heads = query.shape[-1] // D
    return rotated[:, :heads].reshape(query.shape), rotated[:, heads:].reshape(key.shape)


def clamped_swiglu(x: Tensor, gemm1_alpha: float, gemm1_limit: float) -> Tensor:
    """GPT-OSS's activation [.., 2 I] -> [.., I], gates and values alternating. SGLang compiles it with torch.compile,
    which needs a C++ compiler here, and rounds by where in a vector a value lies."""
    gate, up = x[..., ::2].clamp(max=gemm1_limit), x[..., 1::2].clamp(-gemm1_limit, gemm1_limit)
    return gate * torch.sigmoid(gate * gemm1_alpha) * (up + 1)


@demands(
    full_logits="floating T V rows",
)
def cap_logits(full_logits: Tensor, final_logit_softcapping: float) -> Tensor:
    """Gemma's: cap x tanh(logits / cap), in place. A Triton kernel in SGLang."""
    return full_logits.div_(final_logit_softcapping).tanh_().mul_(final_logit_softcapping)
