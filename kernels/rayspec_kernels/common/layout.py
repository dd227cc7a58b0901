"""What a kernel takes, checked before its launch."""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_layouts(wanted: Mapping[str, tuple[Tensor, tuple[int, ...], torch.dtype]]) -> None:
    """Check tensors, by name, against the shape and type that they must have. Raises ValueError."""
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {shape} of {dtype} and contiguous, got {tuple(tensor.shape)} of {tensor.dtype} with "
                f"strides {tensor.stride()}"
            )


def fits(sizes: tuple[int, ...], most: tuple[int, ...]) -> bool:
    """Whether no size is larger than the kernel takes."""
    return all(size <= limit for size, limit in zip(sizes, most, strict=True))


def check_sizes(sizes: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Raises ValueError for one that is not in 1..most."""
    for what, size in sizes.items():
        if not 1 <= size <= most[what]:
            raise ValueError(f"the kernel takes 1..{most[what]} {what}, got {size}")
