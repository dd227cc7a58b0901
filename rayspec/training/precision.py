"""Where bfloat16 is worth it: a processor without instructions for it emulates each product.

On an AMD EPYC with AVX2 alone that takes six to eight times as long as the same product in float32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon

BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is ARM's


def has_bfloat16(device: torch.device) -> bool:
    """Whether it has instructions for products in bfloat16; GPUs that train have them."""
    if device.type != "cpu":
        return True
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in BFLOAT16_INSTRUCTIONS)


def fast_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if has_bfloat16(device) else torch.float32


class Float32Muon(torch.optim.Muon):
    """PyTorch's Muon (Keller Jordan, 2024), whose Newton-Schulz iterations are in bfloat16 there, in float32."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with _iterations_in_float32():
            return super().step(closure)


@contextmanager
def _iterations_in_float32() -> Iterator[None]:
    theirs = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = _orthogonalised
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = theirs


def _orthogonalised(grad_MN: Tensor, ns_coefficients: tuple[float, float, float], ns_steps: int, eps: float) -> Tensor:
    """Replaces PyTorch's function, with its arguments: about the nearest orthogonal matrix, [M, N] as given."""
    a, b, c = ns_coefficients
    is_tall = grad_MN.shape[0] > grad_MN.shape[1]
    x_SL = grad_MN.float().mT if is_tall else grad_MN.float()
    x_SL = x_SL / x_SL.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram_SS = x_SL @ x_SL.mT
        x_SL = torch.addmm(x_SL, torch.addmm(gram_SS, gram_SS, gram_SS, beta=b, alpha=c), x_SL, beta=a)
    return x_SL.mT if is_tall else x_SL
