"""Weights in fewer bits, activations untouched. N = outputs, K = inputs, g = inputs that share a scale, M = rows.

int8 and fp8 (e4m3): symmetric, one scale a row, W ~ q * scale. int4: asymmetric in groups along K, two values a byte
(even column in the low half), W ~ (q - 8) * scale + zero. Scales and zeros are bfloat16, and the values are rounded
against the bfloat16 ones, so that a checkpoint stores exactly what was computed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORMATS = ("int8", "fp8", "int4")
GROUP_SIZES = (32, 64, 128, 256)  # those of torch's int4 kernels
_FP8_MAX = 448.0


class Quantized(NamedTuple):
    values: Tensor  # int8 or float8_e4m3fn [N, K]; uint8 [N, K / 2] for int4
    scales: Tensor  # bfloat16 [N]; [N, K / g, 2] for int4: scale and zero

    def rows(self, ids_n: Tensor) -> "Quantized":
        return Quantized(self.values.index_select(0, ids_n), self.scales.index_select(0, ids_n))


def quantize_reference(weight_NK: Tensor, weight_format: str, group_size: int = 64) -> Quantized:
    """Round to nearest. Raises ValueError for an unknown format and for a width that the groups do not divide."""
    weight_NK = weight_NK.float()
    if weight_format == "int4":
        return _quantize_int4(weight_NK, group_size)
    most_N = weight_NK.abs().amax(dim=1).clamp(min=1e-8)
    if weight_format == "int8":
        scale_N = (most_N / 127).bfloat16()
        values_NK = (weight_NK / scale_N.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    elif weight_format == "fp8":
        scale_N = (most_N / _FP8_MAX).bfloat16()
        values_NK = (weight_NK / scale_N.float()[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    else:
        raise ValueError(f"weight_format must be one of {', '.join(FORMATS)}, got {weight_format!r}")
    return Quantized(values_NK, scale_N)


def _quantize_int4(weight_NK: Tensor, group_size: int) -> Quantized:
    N, K = weight_NK.shape
    if group_size not in GROUP_SIZES or K % group_size:
        raise ValueError(f"group_size must be one of {GROUP_SIZES} and divide the {K} inputs, got {group_size}")
    groups = weight_NK.view(N, K // group_size, group_size)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
    zero = (low + 8 * scale.float()).bfloat16()
    values = ((groups - zero.float()[:, :, None]) / scale.float()[:, :, None] + 8).round().clamp(0, 15)
    values_NK = values.view(N, K).to(torch.uint8)
    return Quantized(values_NK[:, ::2] | (values_NK[:, 1::2] << 4), torch.stack([scale, zero], dim=2))


def unpack_int4(values_NK2: Tensor) -> Tensor:
    """uint8 [N, K] in 0..15 from two values a byte."""
    return torch.stack([values_NK2 & 15, values_NK2 >> 4], dim=2).flatten(1)


def dequantize_reference(quantized: Quantized) -> Tensor:
    """float32 [N, K]."""
    values, scales = quantized
    if values.dtype != torch.uint8:
        return values.float() * scales.float()[:, None]
    values_NK = unpack_int4(values).float()
    N, K = values_NK.shape
    groups = values_NK.view(N, scales.shape[1], -1) - 8
    return (groups * scales[:, :, :1].float() + scales[:, :, 1:].float()).view(N, K)
