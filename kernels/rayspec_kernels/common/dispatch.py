"""Kernel or reference: one rule for all operations."""

import torch
from torch import Tensor

from rayspec_kernels.common.quantized import Quantized


def uses_kernel(*tensors: Tensor) -> bool:
    """On a CUDA device with bfloat16 tensor cores (for fp8 weights one that knows them), where there are rows, of a
    type that kernels take, and no gradient is asked for; not under autocast, which casts the operands of torch's own
    products alone. The first tensor is the activations.

    Decided by device, type and shape, never by values, so that tracing and graph capture see one path.
    """
    x = tensors[0]
    if not all(t.is_cuda for t in tensors) or torch.version.hip is not None:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.shape[0] == 0:
        return False
    if torch.is_autocast_enabled("cuda"):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    return torch.cuda.get_device_capability(x.device) >= max(least_capability(t) for t in tensors)


def least_capability(weight: Tensor) -> tuple[int, int]:
    """Of a CUDA device whose tensor cores know the numbers of a weight, or those that they become."""
    return (8, 9) if weight.dtype == torch.float8_e4m3fn else (8, 0)


def parts(weight: Tensor | Quantized) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of a matrix, as an operator's schema takes it."""
    return (weight, None) if isinstance(weight, Tensor) else weight


def joined(values: Tensor, scales: Tensor | None) -> Tensor | Quantized:
    return values if scales is None else Quantized(values, scales)
