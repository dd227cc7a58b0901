"""Heads on weights in fewer bits: nothing is lost beyond what the storage format lost."""

import pytest
import torch
from matrices import with_row_stride
from torch import Tensor

from rayspec_kernels.common.closeness import FLOAT32_SUMS, ROUNDED, assert_best, assert_close, drawn
from rayspec_kernels.common.quantized import (
    FORMATS,
    GROUP_SIZES,
    Quantized,
    dequantize_reference,
    quantize_reference,
)
from rayspec_kernels.gather_dot import _gather_dot, gather_dot
from rayspec_kernels.gather_dot.kernel import gather_dot_kernel
from rayspec_kernels.gather_dot.reference import gather_dot_reference
from rayspec_kernels.head_topk import _head_topk
from rayspec_kernels.head_topk.kernel import head_topk_kernel
from rayspec_kernels.head_topk.reference import head_topk_reference
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference
from rayspec_kernels.slim_head.kernel import slim_head_kernel
from rayspec_kernels.slim_head.reference import slim_head_reference


def quantized(N: int, K: int, weight_format: str, device: torch.device, group: int = 32) -> Quantized:
    """Rows of very different sizes, groups with offsets: a scale or zero of the wrong place shows."""
    weight_NK = drawn(N, K, dtype=torch.float32, device=torch.device("cpu"), seed=3)
    weight_NK *= torch.logspace(-1, 1, N)[:, None]
    weight_NK += torch.linspace(-1, 1, K)
    return Quantized(*(t.to(device) for t in quantize_reference(weight_NK, weight_format, group)))


def exact_scores(x_BH: Tensor, weight: Quantized) -> Tensor:
    return x_BH.double() @ dequantize_reference(weight).double().T


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "V", "H", "k"), [(1, 150, 64, 3), (40, 33, 96, 2)], ids=["one_row", "two_batches"])
def test_dense_head(
    weight_format: str, B: int, V: int, H: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    x_BH, weight = drawn(B, H, dtype=dtype, device=device), quantized(V, H, weight_format, device)
    exact = head_topk_reference(x_BH.double(), dequantize_reference(weight).double(), k)
    assert_best(head_topk_kernel(x_BH, weight, k), exact, exact_scores(x_BH, weight), FLOAT32_SUMS)


@pytest.mark.parametrize("group", [64, 128])
def test_groups_of_int4(group: int, device: torch.device) -> None:
    x_BH, weight = drawn(2, 256, dtype=torch.bfloat16, device=device), quantized(20, 256, "int4", device, group)
    exact = head_topk_reference(x_BH.double(), dequantize_reference(weight).double(), 4)
    assert_best(head_topk_kernel(x_BH, weight, 4), exact, exact_scores(x_BH, weight), FLOAT32_SUMS)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("T", "n", "V", "H"),
    [(1, 1, 1, 32), (3, 11, 29, 96), (2, 9, 5, 2080)],
    ids=["ones", "odd", "beyond_a_block_of_columns"],
)
def test_chosen_rows(
    weight_format: str, T: int, n: int, V: int, H: int, dtype: torch.dtype, device: torch.device
) -> None:
    x_TH, weight = drawn(T, H, dtype=dtype, device=device), quantized(V, H, weight_format, device)
    ids_Tn = torch.randint(V, (T, n), generator=torch.Generator().manual_seed(n)).to(device)
    exact = exact_scores(x_TH, weight).gather(1, ids_Tn)
    for out_Tn in (gather_dot_kernel(x_TH, weight, ids_Tn), gather_dot_kernel(x_TH, weight, ids_Tn.int())):
        assert out_Tn.dtype == dtype
        assert_close(out_Tn, exact, ROUNDED[dtype])
    wide = dequantize_reference(weight).double()
    torch.testing.assert_close(gather_dot_reference(x_TH.double(), weight, ids_Tn), exact)
    torch.testing.assert_close(gather_dot_reference(x_TH.double(), wide, ids_Tn), exact)


@pytest.mark.parametrize("group", GROUP_SIZES)
def test_chosen_rows_in_groups_of_int4(group: int, device: torch.device) -> None:
    x_TH, weight = drawn(2, 768, dtype=torch.bfloat16, device=device), quantized(20, 768, "int4", device, group)
    ids_Tn = torch.tensor([[19, 0, 7], [3, 3, 18]], device=device)
    exact = exact_scores(x_TH, weight).gather(1, ids_Tn)
    assert_close(gather_dot_kernel(x_TH, weight, ids_Tn), exact, ROUNDED[torch.bfloat16])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_faults_and_ids_of_no_row_stay_where_they_are(weight_format: str, device: torch.device) -> None:
    x_TH, weight = drawn(3, 96, dtype=torch.float32, device=device), quantized(9, 96, weight_format, device)
    x_TH[1, 5] = float("nan")
    x_TH[2, 63] = float("inf")
    weight.scales[4] = float("nan")
    ids_Tn = torch.tensor([[3, 4, 9, -1, 8]] * 3, device=device)  # a block of columns ends beyond row 3
    out_Tn = gather_dot_kernel(x_TH, weight, ids_Tn)
    assert out_Tn[0].isfinite().tolist() == [True, False, False, False, True]
    assert not out_Tn[1:].isfinite().any()
    expected = exact_scores(x_TH[:1], weight)[:, [3, 8]]
    assert_close(out_Tn[:1, [0, 4]], expected, ROUNDED[torch.float32])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_chosen_rows_beyond_32_bits(weight_format: str, device: torch.device) -> None:
    """Row 299 lies 2.7e9 elements from row 0."""
    x_TH, weight = drawn(2, 32, dtype=torch.bfloat16, device=device), quantized(300, 32, weight_format, device)
    ids_Tn = torch.tensor([[299, 0], [298, 299]], device=device)
    far = Quantized(with_row_stride(weight.values, 9_000_000), weight.scales)
    assert torch.equal(gather_dot_kernel(x_TH, far, ids_Tn), gather_dot_kernel(x_TH, weight, ids_Tn))


@pytest.mark.parametrize("weight_format", FORMATS)
def test_slim_head(weight_format: str, device: torch.device) -> None:
    x_BH = drawn(2, 64, dtype=torch.bfloat16, device=device)
    down, up = quantized(32, 64, weight_format, device), quantized(70, 32, weight_format, device)
    wide_down, wide_up = dequantize_reference(down).double(), dequantize_reference(up).double()
    hidden_Br = x_BH.double() @ wide_down.T
    exact = slim_head_reference(x_BH.double(), wide_down, wide_up, 3)
    assert_best(slim_head_kernel(x_BH, down, up, 3), exact, hidden_Br @ wide_up.T, ROUNDED[torch.bfloat16])


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("groups", [1, 2])
def test_indexed_head(groups: int, weight_format: str, device: torch.device) -> None:
    x_BH, weight = drawn(2, 64, dtype=torch.bfloat16, device=device), quantized(90, 64, weight_format, device)
    ids_L = torch.arange(89, -1, -1, device=device)
    tiles = Tiles(torch.tensor([[5, 16], [60, 3], [0, 0]], dtype=torch.int32, device=device), 16)
    if groups == 2:
        is_of_tG = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.int8, device=device)
        tiles = tiles._replace(is_of_tG=is_of_tG)
    exact = indexed_head_reference(x_BH.double(), dequantize_reference(weight).double(), ids_L, 3, tiles)
    out = indexed_head_kernel(x_BH, weight, ids_L, 3, tiles)
    assert_best(out, exact, exact_scores(x_BH, weight), FLOAT32_SUMS)


def test_reference_dequantises() -> None:
    """By hand: 2 * 3 + 1 * -1 = 5 beats 2 * 1 + 1 * 2 = 4."""
    weight = Quantized(torch.tensor([[1, 2], [3, -1]], dtype=torch.int8), torch.tensor([1.0, 1.0]).bfloat16())
    best = head_topk_reference(torch.tensor([[2.0, 1.0]]), weight, 2)
    assert best.scores_Bk.tolist() == [[5.0, 4.0]]
    assert best.ids_Bk.tolist() == [[1, 0]]


def test_what_is_refused(device: torch.device) -> None:
    x_BH, weight = torch.ones(1, 64, device=device), quantized(8, 64, "int4", device)
    with pytest.raises(ValueError, match="equally wide"):
        head_topk_kernel(x_BH[:, :32], weight, 2)
    with pytest.raises(ValueError, match="must be of"):
        head_topk_kernel(x_BH, Quantized(weight.values.short(), weight.scales), 2)
    for scales in (
        weight.scales[:7],
        weight.scales.float(),
        weight.scales[:, :, 0],
        weight.scales.repeat(1, 2, 1),  # groups of 16
        weight.scales.transpose(0, 1).contiguous().transpose(0, 1),
    ):
        with pytest.raises(ValueError, match="scales of int4 must be"):
            head_topk_kernel(x_BH, Quantized(weight.values, scales), 2)
    with pytest.raises(ValueError, match="scales must be one a row"):
        head_topk_kernel(x_BH, Quantized(torch.ones(8, 64, dtype=torch.int8), weight.scales[:, 0]), 2)


def test_scales_of_a_slice_are_read_where_they_lie(device: torch.device) -> None:
    x_BH, weight = drawn(2, 128, dtype=torch.bfloat16, device=device), quantized(20, 256, "int4", device)
    late = Quantized(weight.values[:, 64:], weight.scales[:, 4:])
    every_other = Quantized(late.values[::2], late.scales[::2])
    exact = head_topk_reference(x_BH.double(), dequantize_reference(every_other).double(), 4)
    out = head_topk_kernel(x_BH, every_other, 4)
    assert_best(out, exact, exact_scores(x_BH, every_other), FLOAT32_SUMS)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])  # opcheck multiplies its inputs, which fp8 does not know
def test_operators(weight_format: str, device: torch.device) -> None:
    x_BH, weight = drawn(1, 64, dtype=torch.bfloat16, device=device), quantized(20, 64, weight_format, device)
    ids_Tn = torch.tensor([[3, 19]], device=device)
    torch.library.opcheck(_head_topk, (x_BH, *weight, 3, None))
    torch.library.opcheck(_gather_dot, (x_BH, *weight, ids_Tn))
    exact = exact_scores(x_BH, weight).gather(1, ids_Tn)
    assert_close(gather_dot(x_BH, weight, ids_Tn), exact, 2 * ROUNDED[torch.bfloat16])  # the reference rounds weights
