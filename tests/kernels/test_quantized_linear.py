"""Weights in fewer bits: rounding errors as small as the format allows, and the kernels against the reference."""

import pytest
import torch
from torch import Tensor

from rayspec_kernels.quantized_linear.kernel import QuantizedLinear
from rayspec_kernels.quantized_linear.reference import (
    FORMATS,
    dequantize_reference,
    quantize_reference,
    quantized_linear_reference,
    unpack_int4,
)

N, K = 96, 128


@pytest.fixture
def weight_NK() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, N)[:, None]


def test_int4_is_off_by_half_a_step_at_most(weight_NK: Tensor) -> None:
    quantized = quantize_reference(weight_NK, "int4", 32)
    assert quantized.values.shape == (N, K // 2)
    assert quantized.scales.shape == (N, K // 32, 2)
    error = (dequantize_reference(quantized) - weight_NK).abs().view(N, -1, 32)
    step = quantized.scales[:, :, :1].float()
    zero = quantized.scales[:, :, 1:].float().abs()
    # half a step, and what rounding scale and zero to bfloat16 moves the ends of the range
    assert bool((error <= 0.5 * step + 2**-8 * (8 * step + zero)).all())


def test_int8_is_off_by_half_a_step_at_most(weight_NK: Tensor) -> None:
    quantized = quantize_reference(weight_NK, "int8")
    error = (dequantize_reference(quantized) - weight_NK).abs()
    assert bool((error <= (0.5 + 127 * 2**-8) * quantized.scales.float()[:, None]).all())


def test_fp8_keeps_three_bits_of_mantissa(weight_NK: Tensor) -> None:
    quantized = quantize_reference(weight_NK, "fp8")
    error = (dequantize_reference(quantized) - weight_NK).abs()
    smallest = quantized.scales.float()[:, None] * 2**-9
    assert bool((error <= 2**-4 * weight_NK.abs() + 2**-8 * weight_NK.abs() + smallest).all())


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_second_rounding_changes_nothing(weight_format: str, weight_NK: Tensor) -> None:
    once = dequantize_reference(quantize_reference(weight_NK, weight_format, 64))
    twice = dequantize_reference(quantize_reference(once, weight_format, 64))
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_constant_and_zero_rows(weight_format: str) -> None:
    weight = torch.zeros(32, 64)
    weight[1] = 3.0
    restored = dequantize_reference(quantize_reference(weight, weight_format, 32))
    torch.testing.assert_close(restored, weight, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("outputs", [N, 53])
def test_kernel_against_reference(weight_format: str, rows: int, outputs: int, weight_NK: Tensor) -> None:
    quantized = quantize_reference(weight_NK[:outputs], weight_format, 64)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    got = QuantizedLinear(quantized)(x)
    expected = quantized_linear_reference(x, quantized)
    assert got.dtype == x.dtype
    # operands and result in bfloat16, sums in float32
    scale = x.norm(dim=1)[:, None] * dequantize_reference(quantized).norm(dim=1)
    assert bool(((got - expected).abs() <= 2**-7 * scale).all())


def test_two_values_a_byte() -> None:
    values = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    assert unpack_int4(values).tolist() == [[1, 2, 0, 15]]


@pytest.mark.parametrize(("weight_format", "group"), [("int3", 64), ("int4", 48), ("int4", 256)])
def test_what_is_not_offered(weight_format: str, group: int, weight_NK: Tensor) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        quantize_reference(weight_NK, weight_format, group)
