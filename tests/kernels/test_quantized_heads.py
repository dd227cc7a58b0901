"""Heads on weights in fewer bits: nothing is lost beyond what the storage format lost."""

import pytest
import torch
from torch import Tensor

from rayspec_kernels.common.closeness import FLOAT32_SUMS, ROUNDED, assert_best, assert_close, drawn
from rayspec_kernels.common.small_linear import small_linear
from rayspec_kernels.head_topk import _head_topk
from rayspec_kernels.head_topk.kernel import head_topk_kernel
from rayspec_kernels.head_topk.reference import head_topk_reference
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference
from rayspec_kernels.quantized_linear.reference import FORMATS, Quantized, dequantize_reference, quantize_reference
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
@pytest.mark.parametrize(("B", "V", "H", "k"), [(1, 150, 64, 3), (17, 33, 96, 2)], ids=["one_row", "batch"])
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


@pytest.mark.parametrize("weight_format", FORMATS)
def test_slim_head(weight_format: str, device: torch.device) -> None:
    x_BH = drawn(2, 64, dtype=torch.bfloat16, device=device)
    down, up = quantized(32, 64, weight_format, device), quantized(70, 32, weight_format, device)
    wide_down, wide_up = dequantize_reference(down).double(), dequantize_reference(up).double()
    hidden_Br = x_BH.double() @ wide_down.T
    assert_close(small_linear(x_BH, down), hidden_Br, ROUNDED[torch.bfloat16])
    exact = slim_head_reference(x_BH.double(), wide_down, wide_up, 3)
    assert_best(slim_head_kernel(x_BH, down, up, 3), exact, hidden_Br @ wide_up.T, ROUNDED[torch.bfloat16])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_indexed_head(weight_format: str, device: torch.device) -> None:
    x_BH, weight = drawn(2, 64, dtype=torch.bfloat16, device=device), quantized(90, 64, weight_format, device)
    ids_L = torch.arange(89, -1, -1, device=device)
    tiles = Tiles(torch.tensor([[5, 16], [60, 3], [0, 0]], dtype=torch.int32, device=device), 16)
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


def test_operator(device: torch.device) -> None:
    x_BH, weight = drawn(1, 64, dtype=torch.bfloat16, device=device), quantized(20, 64, "int4", device)
    torch.library.opcheck(_head_topk, (x_BH, weight.values, weight.scales, 3, None))
