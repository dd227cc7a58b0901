"""A matrix in fewer bits, as part of a head. N = rows, K = columns, g = columns that share a scale.

Any head may store its matrices so (`weight_format` in `draft_head`): made from a trained head by rounding, or trained
through the rounding with gradients that ignore it (straight-through).
"""

import torch
from torch import Tensor, nn

from rayspec_kernels.common.dispatch import least_capability
from rayspec_kernels.common.quantized import (
    GROUP_SIZES,
    Quantized,
    dequantize_reference,
    quantize_reference,
)


class QuantizedMatrix(nn.Module):
    """`values` and `scales` as in `rayspec_kernels.quantized_linear`. The scales are NaN until loaded."""

    values: Tensor
    scales: Tensor

    def __init__(self, shape: tuple[int, ...], weight_format: str, group_size: int) -> None:
        super().__init__()
        N, K = shape
        self.shape = torch.Size(shape)
        row = quantize_reference(torch.zeros(1, K), weight_format, fitting_group(K, group_size))
        self.register_buffer("values", row.values.expand(N, -1).clone())
        self.register_buffer("scales", torch.full((N, *row.scales.shape[1:]), float("nan"), dtype=row.scales.dtype))

    @classmethod
    def of(cls, weight_NK: Tensor, weight_format: str, group_size: int) -> "QuantizedMatrix":
        N, K = weight_NK.shape
        matrix = cls((N, K), weight_format, group_size).to(weight_NK.device)
        quantized = quantize_reference(weight_NK.detach(), weight_format, fitting_group(K, group_size))
        matrix.values.copy_(quantized.values)
        matrix.scales.copy_(quantized.scales)
        return matrix

    def _apply(self, fn: object, recurse: bool = True) -> "QuantizedMatrix":
        """Moves between devices and keeps the types: `head.to(torch.float32)` is about activations."""
        super()._apply(lambda t: fn(t).to(t.dtype), recurse)  # type: ignore[operator]
        return self

    def quantized(self, rows: int | None = None) -> Quantized:
        return Quantized(self.values[:rows], self.scales[:rows])

    def rows(self, ids_n: Tensor) -> Tensor:
        """float32 [n, K]."""
        return dequantize_reference(self.quantized().rows(ids_n))

    def check_device(self) -> None:
        """Raise ValueError for fp8 on a GPU that has no kernel for it: each call would make numbers of all values."""
        if not self.values.is_cuda or self.values.dtype != torch.float8_e4m3fn:
            return
        here, least = torch.cuda.get_device_capability(self.values.device), least_capability(self.values)
        if here < least:
            needed, found = (".".join(map(str, version)) for version in (least, here))
            raise ValueError(
                f"draft_head.weight_format fp8 needs a GPU of compute capability {needed} or more, and this one has "
                f"{found}; make the head again in int8, int4 or 16 bits (null)"
            )

    @property
    def row_bytes(self) -> int:
        return (self.values.nbytes + self.scales.nbytes) // len(self.values)


class _RoundThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight_NK: Tensor, weight_format: str, group_size: int) -> Tensor:
        quantized = quantize_reference(weight_NK, weight_format, fitting_group(weight_NK.shape[1], group_size))
        return dequantize_reference(quantized).to(weight_NK.dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def round_through(weight_NK: Tensor, weight_format: str, group_size: int) -> Tensor:
    """The weight as it will be stored; the gradient passes as if it were not rounded."""
    return _RoundThrough.apply(weight_NK, weight_format, group_size)  # type: ignore[no-any-return, no-untyped-call]


def fitting_group(columns: int, group_size: int) -> int:
    """`group_size`, or the largest smaller size that divides the columns (low-rank factors are narrow)."""
    return next((g for g in reversed(GROUP_SIZES) if g <= group_size and columns % g == 0), group_size)
