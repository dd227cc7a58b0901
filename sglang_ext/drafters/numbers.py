"""What the numbers in a drafter's tensors must be: of the kind that it computes with, and finite."""

from collections.abc import Mapping

import torch
from torch import Tensor


def kind_of_numbers(dtype: torch.dtype) -> str:
    """Loading converts between dtypes of one kind; each of one byte, the formats of packed weights, is a kind alone."""
    if dtype.itemsize == 1:
        return str(dtype)
    return "floating-point numbers" if dtype.is_floating_point else "integers"


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or Inf."""

    def is_finite(tensor: Tensor) -> bool:
        """Looks at the least and the largest number, which a NaN makes NaN: on a CPU 30 times as fast as each."""
        if not tensor.numel():
            return True
        ends = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)  # there is none of fp8
        return bool(torch.stack(ends).isfinite().all())

    return [name for name, t in tensors.items() if t.is_floating_point() and not is_finite(t)]


def check_finite(tensors: Mapping[str, Tensor], path: str) -> None:
    """Raise ValueError for NaN or Inf, whose drafts are never accepted: measured, they would pass for a bad head."""
    bad = not_finite(tensors)
    if bad:
        raise ValueError(
            f"drafter {path}: {bad[0]} holds NaN or Inf; copy the drafter whole, or train it again with rayspec train"
        )
