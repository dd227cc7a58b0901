"""Weights in fewer bits: rounding errors as small as the format allows, and the kernels against the reference."""

from collections.abc import Callable

import pytest
import torch
from matrices import with_row_stride
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from volume import volume

from rayspec_kernels.common.closeness import ROUNDED, assert_close, drawn
from rayspec_kernels.common.dispatch import uses_kernel
from rayspec_kernels.common.quantized import (
    FORMATS,
    GROUP_SIZES,
    Quantized,
    dequantize_reference,
    quantize_reference,
    unpack_int4,
)
from rayspec_kernels.common.rows_dot import Operand
from rayspec_kernels.quantized_linear import _quantized_linear, quantized_linear
from rayspec_kernels.quantized_linear import kernel as module
from rayspec_kernels.quantized_linear.host import QuantizedLinear
from rayspec_kernels.quantized_linear.kernel import gemv_kernel, linear_kernel, tiled_kernel
from rayspec_kernels.quantized_linear.reference import linear_reference

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
def test_host_against_reference(weight_format: str, rows: int, outputs: int, weight_NK: Tensor) -> None:
    quantized = quantize_reference(weight_NK[:outputs], weight_format, 64)
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(1))
    got = QuantizedLinear(quantized)(x)
    expected = linear_reference(x, quantized)
    assert got.dtype == x.dtype
    # operands and result in bfloat16, sums in float32
    scale = x.norm(dim=1)[:, None] * dequantize_reference(quantized).norm(dim=1)
    assert bool(((got - expected).abs() <= 2**-7 * scale).all())


@pytest.mark.parametrize("weight_format", ["int8", "fp8"])
@pytest.mark.parametrize("width", [10, 24, 72, 180])
@pytest.mark.parametrize("rows", [1, 4])
def test_host_takes_widths_that_16_does_not_divide(weight_format: str, width: int, rows: int) -> None:
    """Low-rank heads have such ones, as of rank 72; torch's kernel reads beyond their end, or dies."""
    generator = torch.Generator().manual_seed(0)
    quantized = quantize_reference(torch.randn(N, width, generator=generator), weight_format)
    x = torch.randn(rows, width, generator=generator)
    scale = x.norm(dim=1)[:, None] * dequantize_reference(quantized).norm(dim=1)
    got, expected = QuantizedLinear(quantized)(x), linear_reference(x, quantized)
    assert bool(((got - expected).abs() <= 2**-7 * scale).all())


def test_two_values_a_byte() -> None:
    values = torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)
    assert unpack_int4(values).tolist() == [[1, 2, 0, 15]]


@pytest.mark.parametrize(("weight_format", "group"), [("int3", 64), ("int4", 48), ("int4", 256)])
def test_what_is_not_offered(weight_format: str, group: int, weight_NK: Tensor) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        quantize_reference(weight_NK, weight_format, group)


def stored(rows: int, width: int, weight_format: str, device: torch.device) -> Quantized:
    weight_NH = drawn(rows, width, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    return Quantized(*(t.to(device) for t in quantize_reference(weight_NH, weight_format, 32)))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "outputs", "width"),
    [(1, 1, 32), (3, volume(301, 21), 96), pytest.param(70, 20, 64, marks=pytest.mark.slow)],
)
def test_kernel_matches_float64(
    rows: int, outputs: int, width: int, dtype: torch.dtype, weight_format: str, device: torch.device
) -> None:
    x_BH, weight = drawn(rows, width, dtype=dtype, device=device), stored(outputs, width, weight_format, device)
    exact = x_BH.double() @ dequantize_reference(weight).double().T
    for y_BN in (tiled_kernel(x_BH, weight), gemv_kernel(x_BH, weight, 2), gemv_kernel(x_BH, weight, 8)):
        assert y_BN.dtype == dtype
        assert_close(y_BN, exact, ROUNDED[dtype])
    assert_close(linear_reference(x_BH.double(), weight), exact, ROUNDED[torch.float32])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_more_rows_than_a_tile(weight_format: str, device: torch.device) -> None:
    """In one type, beside the slow ones in all, and through tensor cores: the other kernel takes row by row."""
    x_BH, weight = drawn(70, 32, dtype=torch.bfloat16, device=device), stored(20, 32, weight_format, device)
    exact = x_BH.double() @ dequantize_reference(weight).double().T
    assert_close(tiled_kernel(x_BH, weight), exact, ROUNDED[torch.bfloat16])


@pytest.mark.parametrize("kernel", [tiled_kernel, gemv_kernel])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_kernel_on_some_rows_far_apart(
    weight_format: str, kernel: Callable[[Tensor, Quantized], Tensor], device: torch.device
) -> None:
    """Row 134 lies 2.7e9 elements from row 0; heads ask for the first rows of a matrix."""
    x_BH, weight = drawn(2, 32, dtype=torch.bfloat16, device=device), stored(135, 32, weight_format, device)
    far, whole_BN = Quantized(with_row_stride(weight.values, 20_000_000), weight.scales), kernel(x_BH, weight)
    assert_close(whole_BN, x_BH.double() @ dequantize_reference(weight).double().T, ROUNDED[torch.bfloat16])
    assert torch.equal(kernel(x_BH, far), whole_BN)
    first = Quantized(*(t[:130] for t in weight))
    assert torch.equal(kernel(x_BH, first), whole_BN[:, :130])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_matrices_and_widths_beyond_a_block(dtype: torch.dtype, device: torch.device) -> None:
    """The matrices in front of fused heads: a width of several blocks with a rest, rows of x that lie apart."""
    wide_BH = drawn(3, 4600, dtype=dtype, device=device)
    x_BH, weight_NH = wide_BH[:, :4500], drawn(21, 4500, dtype=dtype, device=device, seed=1)
    exact = x_BH.double() @ weight_NH.double().T
    for y_BN in (tiled_kernel(x_BH, weight_NH), gemv_kernel(x_BH, weight_NH, 2), gemv_kernel(x_BH, weight_NH, 8)):
        assert_close(y_BN, exact, ROUNDED[dtype])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("parts", [2, 3, 100])
@pytest.mark.parametrize("weight_format", ["plain", *FORMATS])
def test_a_width_in_parts(weight_format: str, parts: int, device: torch.device) -> None:
    """Parts are whole blocks of columns: 1120 of them do not divide evenly, and there are at most 5 to 35."""
    x_BH = drawn(19, 1120, dtype=torch.bfloat16, device=device)
    if weight_format == "plain":
        weight = drawn(21, 1120, dtype=torch.bfloat16, device=device, seed=1)
        wide_NH = weight.double()
    else:
        weight = stored(21, 1120, weight_format, device)
        wide_NH = dequantize_reference(weight).double()
    y_BN = tiled_kernel(x_BH, weight, parts)
    assert_close(y_BN, x_BH.double() @ wide_NH.T, ROUNDED[torch.bfloat16])
    assert torch.equal(y_BN, tiled_kernel(x_BH, weight, parts)), "sums of another order"


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_parts_begin_with_a_group(group: int, device: torch.device) -> None:
    """Turns of the loop are narrower than the largest groups: three of them would be a part that begins in one."""
    x_BH = drawn(3, 768, dtype=torch.bfloat16, device=device)
    weight_NH = drawn(20, 768, dtype=torch.float32, device=torch.device("cpu"), seed=1)
    weight = Quantized(*(t.to(device) for t in quantize_reference(weight_NH, "int4", group)))
    exact = x_BH.double() @ dequantize_reference(weight).double().T
    for parts in (1, 5):
        assert_close(tiled_kernel(x_BH, weight, parts), exact, ROUNDED[torch.bfloat16])


@pytest.mark.parametrize(
    ("width", "stride_x", "stride_w", "divisor"),
    [(64, 64, 64, 16), (72, 72, 72, 8), (72, 72, 74, 2), (72, 73, 72, 1), (90, 96, 96, 2)],
    ids=["all", "width", "matrix", "activations", "only_the_width"],
)
def test_what_divides_width_and_strides(
    width: int, stride_x: int, stride_w: int, divisor: int, device: torch.device
) -> None:
    """Kernels are told, and take their word for it."""
    x_BH, weight_NH = (
        drawn(3, width, dtype=torch.float32, device=device),
        drawn(21, width, dtype=torch.float32, device=device, seed=1),
    )
    exact = x_BH.double() @ weight_NH.double().T
    x_BH, weight_NH = with_row_stride(x_BH, stride_x), with_row_stride(weight_NH, stride_w)
    assert Operand.of(weight_NH, x_BH).alignment(x_BH) == divisor
    for y_BN in (tiled_kernel(x_BH, weight_NH), gemv_kernel(x_BH, weight_NH, 2)):
        assert_close(y_BN, exact, ROUNDED[torch.float32])


@pytest.mark.parametrize(
    ("B", "N", "expected"), [(1, 512, "gemv_kernel"), (5, 512, "tiled_kernel"), (1, 4096, "tiled_kernel")]
)
def test_small_matrices_of_few_rows_go_without_tensor_cores(
    B: int, N: int, expected: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for name in ("gemv_kernel", "tiled_kernel"):
        monkeypatch.setattr(module, name, lambda x_BH, weight, name=name: name)
    x_BH, weight_NH = torch.ones(B, 16, device=device), torch.ones(N, 16, device=device)
    assert linear_kernel(x_BH, weight_NH) == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel_keeps_faults_where_they_are(device: torch.device) -> None:
    x_BH, weight = drawn(3, 32, dtype=torch.float32, device=device), stored(20, 32, "int8", device)
    x_BH[1, 5] = float("nan")
    weight.scales[4] = float("inf")
    expected = torch.ones(3, 20, dtype=torch.bool, device=device)
    expected[1] = False
    expected[:, 4] = False
    for kernel in (tiled_kernel, gemv_kernel):
        assert torch.equal(kernel(x_BH, weight).isfinite(), expected)


def test_kernel_refuses_layouts_and_types(device: torch.device) -> None:
    x_BH, weight = torch.ones(2, 32, device=device), stored(20, 32, "int8", device)
    with pytest.raises(ValueError, match="weight must have two dimensions, rows and contiguous columns"):
        linear_kernel(x_BH, Quantized(weight.values.T.contiguous().T, weight.scales))
    with pytest.raises(ValueError, match="scales must be one a row"):
        linear_kernel(x_BH, Quantized(weight.values, weight.scales[:7]))
    with pytest.raises(ValueError, match="equally wide"):
        linear_kernel(x_BH[:, :16], weight)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_operator_and_dispatch(weight_format: str, device: torch.device) -> None:
    x_BH, weight = drawn(2, 64, dtype=torch.float32, device=device), stored(9, 64, weight_format, device)
    if weight_format != "fp8":  # which torch cannot hash
        torch.library.opcheck(_quantized_linear, (x_BH, *weight))
    exact = x_BH.double() @ dequantize_reference(weight).double().T
    assert_close(quantized_linear(x_BH, weight), exact, ROUNDED[torch.float32])


@pytest.mark.parametrize(
    ("capability", "formats"), [((7, 5), set()), ((8, 0), {"int8", "int4"}), ((8, 9), set(FORMATS))]
)
def test_a_gpu_has_kernels_for_the_formats_that_it_knows(
    capability: tuple[int, int], formats: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtypes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
    with FakeTensorMode(), torch.device("cuda"):
        x_BH = torch.empty(2, 32, dtype=torch.bfloat16)
        assert {name for name in FORMATS if uses_kernel(x_BH, torch.empty(9, 32, dtype=dtypes[name]))} == formats
