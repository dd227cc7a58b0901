"""Random inputs of the benchmarks, made where they are used, and exact scores to judge by."""

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.closeness import assert_best
from rayspec_kernels.common.quantized import Quantized, dequantize_reference

DTYPE = torch.bfloat16
GROUP = 64  # columns that share an int4 scale
_CHUNK = 16384


def random(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=DTYPE) * scale


def random_ids(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)


def formats(*widths: int) -> tuple[str, ...]:
    """Those in which matrices so wide are stored."""
    return ("bf16", "int8", "fp8", "int4") if all(width % GROUP == 0 for width in widths) else ("bf16", "int8", "fp8")


def random_weight(generator: torch.Generator, rows: int, width: int, weight_format: str) -> Tensor | Quantized:
    """Logits of unit size. Quantised ones are drawn as stored: rounding a matrix of gigabytes would be slower."""
    if weight_format == "bf16":
        return random(generator, rows, width, scale=width**-0.5)
    scale = random(generator, rows, scale=0.2).exp_() * width**-0.5
    if weight_format == "fp8":
        return Quantized(random(generator, rows, width).to(torch.float8_e4m3fn), scale)
    if weight_format == "int8":
        return Quantized(random_ids(generator, 255, rows, width).sub_(127).to(torch.int8), scale / 74)
    groups = width // GROUP
    pairs = torch.stack([random(generator, rows, groups, scale=0.2).exp_(), random(generator, rows, groups)], dim=2)
    values = random_ids(generator, 256, rows, width // 2).to(torch.uint8)
    return Quantized(values, pairs * (width**-0.5 / 5))


def stored_bytes(rows: int, width: int, weight_format: str) -> int:
    if weight_format == "bf16":
        return 2 * rows * width
    if weight_format == "int4":
        return rows * width // 2 + 4 * rows * (width // GROUP)
    return rows * width + 2 * rows


def best_bytes(batch: int, k: int) -> int:
    return batch * (k * (4 + 8) + 4)


def float64_scores(x_BH: Tensor, weight: Tensor | Quantized) -> Tensor:
    """[B, V], a part of the rows at a time: a vocabulary in float64 takes gigabytes."""
    values, scales = (weight, None) if isinstance(weight, Tensor) else weight
    parts = []
    for at in range(0, len(values), _CHUNK):
        part = values[at : at + _CHUNK]
        wide = part if scales is None else dequantize_reference(Quantized(part, scales[at : at + _CHUNK]))
        parts.append(x_BH.double() @ wide.double().T)
    return torch.cat(parts, dim=1)


def check_best(out: Best, scores_BV: Tensor, tolerance: float) -> None:
    assert_best(out, best_reference(scores_BV, out.scores_Bk.shape[1]), scores_BV, tolerance)
