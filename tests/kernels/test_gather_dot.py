"""Dot products with chosen rows, against Python loops; shapes with one row, one choice, repeats and nothing at all."""

import pytest
import torch
from torch import Tensor

from rayspec_kernels.gather_dot.reference import gather_dot_reference


def drawn(T: int, n: int, V: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + n)
    x_TH = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(V, H, generator=generator, dtype=torch.float64)
    return x_TH, weight_VH, torch.randint(V, (T, n), generator=generator)


@pytest.mark.parametrize(
    ("T", "n"), [(1, 1), (1, 9), (5, 1), (5, 9), (3, 40), (0, 4), (4, 0)], ids=lambda size: str(size)
)
def test_matches_loops(T: int, n: int) -> None:
    x_TH, weight_VH, ids_Tn = drawn(T, n, V=13, H=7)  # 40 choices of 13 rows: some are repeated
    out_Tn = gather_dot_reference(x_TH, weight_VH, ids_Tn)
    assert out_Tn.shape == (T, n)
    for t in range(T):
        for j in range(n):
            expected = sum(float(a) * float(b) for a, b in zip(weight_VH[ids_Tn[t, j]], x_TH[t], strict=True))
            assert float(out_Tn[t, j]) == pytest.approx(expected)


def test_all_rows_in_order_are_the_dense_product() -> None:
    x_TH, weight_VH, _ = drawn(5, 1, V=13, H=7)
    torch.testing.assert_close(
        gather_dot_reference(x_TH, weight_VH, torch.arange(13).expand(5, -1)), x_TH @ weight_VH.T
    )


def test_layout_of_the_arguments_does_not_matter() -> None:
    x_TH, weight_VH, ids_Tn = drawn(5, 9, V=13, H=7)
    expected = gather_dot_reference(x_TH, weight_VH, ids_Tn)
    transposed = [t.T.contiguous().T for t in (x_TH, weight_VH, ids_Tn)]
    assert not any(t.is_contiguous() for t in transposed)
    torch.testing.assert_close(gather_dot_reference(*transposed), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_answer_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    x_TH, weight_VH, ids_Tn = drawn(5, 9, V=13, H=7)
    out_Tn = gather_dot_reference(x_TH.to(dtype), weight_VH.to(dtype), ids_Tn)
    assert out_Tn.dtype == dtype
    # each of 7 products of size 1 is rounded twice, by bfloat16's 2^-9 at the worst
    torch.testing.assert_close(out_Tn.double(), gather_dot_reference(x_TH, weight_VH, ids_Tn), rtol=0, atol=0.1)


@pytest.mark.parametrize("wrong", [-1, 13])
def test_ids_outside_of_the_matrix_are_refused(wrong: int) -> None:
    x_TH, weight_VH, ids_Tn = drawn(2, 3, V=13, H=7)
    ids_Tn[1, 2] = wrong
    with pytest.raises(IndexError):
        gather_dot_reference(x_TH, weight_VH, ids_Tn)
