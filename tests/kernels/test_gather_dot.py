"""Dot products with chosen rows, against Python loops; shapes with one row, one choice, repeats and nothing at all.

Weights in fewer bits: test_quantized_heads.py.
"""

import pytest
import torch
from matrices import with_row_stride
from torch import Tensor

from rayspec_kernels.common.closeness import ROUNDED, assert_close, drawn
from rayspec_kernels.gather_dot import _gather_dot, gather_dot
from rayspec_kernels.gather_dot.kernel import gather_dot_kernel
from rayspec_kernels.gather_dot.reference import gather_dot_reference


def drawn_case(T: int, n: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + n)
    x_TH = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(V, H, generator=generator, dtype=torch.float64)
    return x_TH, weight_VH, torch.randint(V, (T, n), generator=generator)


@pytest.mark.parametrize(
    ("T", "n"), [(1, 1), (1, 9), (5, 1), (5, 9), (3, 40), (0, 4), (4, 0)], ids=lambda size: str(size)
)
def test_matches_loops(T: int, n: int) -> None:
    x_TH, weight_VH, ids_Tn = drawn_case(T, n, V=13, H=7)  # 40 choices of 13 rows: some are repeated
    out_Tn = gather_dot_reference(x_TH, weight_VH, ids_Tn)
    assert out_Tn.shape == (T, n)
    for t in range(T):
        for j in range(n):
            expected = sum(float(a) * float(b) for a, b in zip(weight_VH[ids_Tn[t, j]], x_TH[t], strict=True))
            assert float(out_Tn[t, j]) == pytest.approx(expected)


def test_all_rows_in_order_are_the_dense_product() -> None:
    x_TH, weight_VH, _ = drawn_case(5, 1, V=13, H=7)
    torch.testing.assert_close(
        gather_dot_reference(x_TH, weight_VH, torch.arange(13).expand(5, -1)), x_TH @ weight_VH.T
    )


def test_layout_of_the_arguments_does_not_matter() -> None:
    x_TH, weight_VH, ids_Tn = drawn_case(5, 9, V=13, H=7)
    expected = gather_dot_reference(x_TH, weight_VH, ids_Tn)
    transposed = [t.T.contiguous().T for t in (x_TH, weight_VH, ids_Tn)]
    assert not any(t.is_contiguous() for t in transposed)
    torch.testing.assert_close(gather_dot_reference(*transposed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_answer_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    x_TH, weight_VH, ids_Tn = drawn_case(5, 9, V=13, H=7)
    out_Tn = gather_dot_reference(x_TH.to(dtype), weight_VH.to(dtype), ids_Tn)
    assert out_Tn.dtype == dtype
    # each of 7 products of size 1 is rounded twice, by bfloat16's 2^-9 at the worst
    torch.testing.assert_close(out_Tn.double(), gather_dot_reference(x_TH, weight_VH, ids_Tn), rtol=0, atol=0.1)


@pytest.mark.parametrize("wrong", [-1, 13])
def test_ids_outside_of_the_matrix_are_refused(wrong: int) -> None:
    x_TH, weight_VH, ids_Tn = drawn_case(2, 3, V=13, H=7)
    ids_Tn[1, 2] = wrong
    with pytest.raises(IndexError):
        gather_dot_reference(x_TH, weight_VH, ids_Tn)


def chosen(T: int, n: int, V: int, device: torch.device) -> Tensor:
    return torch.randint(V, (T, n), generator=torch.Generator().manual_seed(n)).to(device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("T", "n", "V", "H"), [(1, 1, 1, 1), (3, 11, 29, 77), (2, 8, 5, 600)])
def test_kernel_matches_float64(T: int, n: int, V: int, H: int, dtype: torch.dtype, device: torch.device) -> None:
    x_TH, weight_VH = drawn(T, H, dtype=dtype, device=device), drawn(V, H, dtype=dtype, device=device, seed=1)
    ids_Tn = chosen(T, n, V, device)
    exact = gather_dot_reference(x_TH.double(), weight_VH.double(), ids_Tn)
    for ids in (ids_Tn, ids_Tn.int()):
        out_Tn = gather_dot_kernel(x_TH, weight_VH, ids)
        assert out_Tn.dtype == dtype
        assert_close(out_Tn, exact, ROUNDED[dtype])


def test_kernel_with_nothing_to_do(device: torch.device) -> None:
    x_TH, weight_VH = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    assert gather_dot_kernel(x_TH, weight_VH, torch.empty(2, 0, dtype=torch.int64, device=device)).shape == (2, 0)


def test_kernel_marks_ids_outside_of_the_matrix(device: torch.device) -> None:
    ids_Tn = torch.tensor([[0, -1, 3, 2]], device=device)
    out_Tn = gather_dot_kernel(torch.ones(1, 4, device=device), torch.ones(3, 4, device=device), ids_Tn)
    assert out_Tn.isnan().tolist() == [[False, True, True, False]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernel_keeps_faults_in_their_row(device: torch.device) -> None:
    x_TH, weight_VH = torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)
    weight_VH[1, 2], weight_VH[2, 0] = float("nan"), float("-inf")
    out_Tn = gather_dot_kernel(x_TH, weight_VH, torch.tensor([[0, 1], [2, 0]], device=device))
    torch.testing.assert_close(
        out_Tn, torch.tensor([[4.0, float("nan")], [float("-inf"), 4.0]]).to(device), equal_nan=True
    )


def test_kernel_offsets_beyond_32_bits(device: torch.device) -> None:
    x_TH, weight_VH = (
        drawn(2, 16, dtype=torch.bfloat16, device=device),
        drawn(300, 16, dtype=torch.bfloat16, device=device),
    )
    ids_Tn = torch.tensor([[299, 0], [298, 299]], device=device)
    out_Tn = gather_dot_kernel(x_TH, with_row_stride(weight_VH, 9_000_000), ids_Tn)
    assert torch.equal(out_Tn, gather_dot_kernel(x_TH, weight_VH, ids_Tn))


def test_kernel_refuses_layouts_and_types(device: torch.device) -> None:
    x_TH, weight_VH = torch.ones(2, 8, device=device), torch.ones(5, 8, device=device)
    ids_Tn = chosen(2, 3, 5, device)
    with pytest.raises(ValueError, match="weight must have two dimensions, rows and contiguous columns"):
        gather_dot_kernel(x_TH, weight_VH.T.contiguous().T, ids_Tn)
    with pytest.raises(ValueError, match="dtype of x"):
        gather_dot_kernel(x_TH, weight_VH.half(), ids_Tn)
    with pytest.raises(ValueError, match="equally wide"):
        gather_dot_kernel(x_TH, weight_VH[:, :4], ids_Tn)
    for ids in (ids_Tn[:1], ids_Tn[0], ids_Tn.T.contiguous().T):
        with pytest.raises(ValueError, match="ids must have two dimensions, the 2 rows of x and contiguous columns"):
            gather_dot_kernel(x_TH, weight_VH, ids)


def test_operator_and_dispatch(device: torch.device) -> None:
    x_TH, weight_VH = drawn(2, 16, dtype=torch.float32, device=device), drawn(9, 16, dtype=torch.float32, device=device)
    ids_Tn = chosen(2, 5, 9, device)
    torch.library.opcheck(_gather_dot, (x_TH, weight_VH, None, ids_Tn))
    exact = gather_dot_reference(x_TH.double(), weight_VH.double(), ids_Tn)
    assert_close(gather_dot(x_TH, weight_VH, ids_Tn), exact, ROUNDED[torch.float32])


def test_rows_of_x_may_lie_apart(device: torch.device) -> None:
    """8 divides the width and not this stride, of which the kernel must not be told otherwise."""
    x_TH, weight_VH = drawn(3, 24, dtype=torch.float32, device=device), drawn(9, 24, dtype=torch.float32, device=device)
    ids_Tn = chosen(3, 5, 9, device)
    apart_Tn = gather_dot_kernel(with_row_stride(x_TH, 29), weight_VH, ids_Tn)
    assert torch.equal(apart_Tn, gather_dot_kernel(x_TH, weight_VH, ids_Tn))
