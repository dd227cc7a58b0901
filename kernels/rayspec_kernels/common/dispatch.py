"""Kernel or reference: one rule for all operations."""

import torch
from torch import Tensor

from rayspec_kernels.quantized_linear.reference import Quantized


def uses_kernel(*tensors: Tensor) -> bool:
    """On a CUDA device with bfloat16 tensor cores, where no gradient is asked for (the kernels have none).

    Decided by device and shape alone, never by values, so that tracing and graph capture see one path.
    """
    if not all(t.is_cuda for t in tensors) or torch.version.hip is not None:
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


def parts(weight: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of a matrix, as an operator's schema takes it."""
    return (weight, None) if isinstance(weight, Tensor) else weight


def joined(values: Tensor, scales: Tensor | None) -> Tensor | Quantized:
    return values if scales is None else Quantized(values, scales)
