"""Matrices on which a kernel could go wrong."""

import torch
from torch import Tensor


def whole_numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random whole numbers in -2..2: sums are exact in every type, so that many of them tie."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)


def with_row_stride(matrix: Tensor, stride: int) -> Tensor:
    """A copy whose rows lie `stride` elements apart; virtual memory that is never touched costs nothing."""
    rows, width = matrix.shape
    storage = torch.empty((rows - 1) * stride + width, dtype=matrix.dtype, device=matrix.device)
    spread = storage.as_strided((rows, width), (stride, 1))
    spread.copy_(matrix)
    return spread
