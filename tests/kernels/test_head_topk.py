"""The fused dense head against float64."""

import pytest
import torch
from matrices import whole_numbers, with_row_stride

from rayspec_kernels.common.best import best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best, drawn
from rayspec_kernels.common.quantized import Quantized, quantize_reference
from rayspec_kernels.head_topk import _head_topk, head_topk
from rayspec_kernels.head_topk.kernel import head_topk_kernel
from rayspec_kernels.head_topk.reference import head_topk_reference

SHAPES = {
    "one_of_everything": (1, 1, 1, 1),
    "odd": (3, 301, 77, 5),
    "batch_beyond_a_tile": (67, 45, 64, 2),
    "several_tiles": (2, 600, 128, 3),
    "every_candidate_kept": (2, 7, 33, 7),
    "most_kept_of_two_tiles": (1, 150, 32, 16),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "V", "H", "k"), SHAPES.values(), ids=SHAPES.keys())
def test_matches_float64(B: int, V: int, H: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x_BH, weight_VH = drawn(B, H, dtype=dtype, device=device), drawn(V, H, dtype=dtype, device=device, seed=1)
    scores_BV = x_BH.double() @ weight_VH.double().T
    exact = head_topk_reference(x_BH.double(), weight_VH.double(), k)
    assert_best(head_topk_kernel(x_BH, weight_VH, k), exact, scores_BV, FLOAT32_SUMS)


def test_reference_by_hand() -> None:
    best = best_reference(torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0]]), 3)
    assert best.scores_Bk.tolist() == [[3.0, 3.0, 2.0]]
    assert best.ids_Bk.tolist() == [[1, 2, 4]]  # of the two threes the first one comes first
    assert float(best.log_norm_B) == pytest.approx(3.93727, abs=1e-5)  # log(e + 2 e^3 + 1 + e^2)


def test_equal_scores_go_to_the_lowest_id(device: torch.device) -> None:
    """Within a tile, across tiles, and where more candidates tie than are kept."""
    x_BH = whole_numbers(4, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(300, 16, dtype=torch.bfloat16, device=device)
    out, expected = head_topk_kernel(x_BH, weight_VH, 9), head_topk_reference(x_BH.double(), weight_VH.double(), 9)
    assert len(expected.scores_Bk[0].unique()) < 9, "no ties: the test would show nothing"
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    nothing = head_topk_kernel(torch.zeros_like(x_BH), -weight_VH, 3)  # -0 and +0 tie
    assert nothing.ids_Bk.tolist() == [[0, 1, 2]] * 4


def test_given_ids_name_the_candidates(device: torch.device) -> None:
    x_BH = drawn(2, 32, dtype=torch.float32, device=device)
    weight_VH = drawn(140, 32, dtype=torch.float32, device=device)
    ids_V = torch.arange(140, device=device) * 3 + 5
    expected = head_topk_reference(x_BH, weight_VH, 4, ids_V)
    assert torch.equal(head_topk_kernel(x_BH, weight_VH, 4, ids_V).ids_Bk, expected.ids_Bk)
    assert torch.equal(expected.ids_Bk, head_topk_reference(x_BH, weight_VH, 4).ids_Bk * 3 + 5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
def test_faults_show(device: torch.device) -> None:
    """NaN counts as the largest and spoils the normaliser, infinities keep their places; other rows stay clean."""
    x_BH = torch.eye(4, 16, dtype=torch.float32, device=device)
    weight_VH = drawn(140, 16, dtype=torch.float32, device=device)
    weight_VH[[3, 139], 0] = float("nan")
    weight_VH[130, 1] = float("inf")
    weight_VH[:, 2] = float("-inf")
    # a fault in one column of the matrix reaches every row of x through 0 * inf: give each row its own matrix
    for row in range(4):
        only_VH = torch.where(torch.arange(16, device=device) == row, weight_VH, 0.0)
        out = head_topk_kernel(x_BH[row : row + 1], only_VH, 3)
        expected = head_topk_reference(x_BH[row : row + 1].double(), only_VH.double(), 3)
        torch.testing.assert_close(out.scores_Bk.double(), expected.scores_Bk, equal_nan=True)
        torch.testing.assert_close(out.log_norm_B.double(), expected.log_norm_B, equal_nan=True)
        assert torch.equal(out.ids_Bk, expected.ids_Bk)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """Row 299 lies 2.7e9 elements from row 0, as row 262143 of a 262144 x 8192 matrix lies 2.1e9."""
    x_BH = drawn(2, 16, dtype=torch.bfloat16, device=device)
    weight_VH = drawn(300, 16, dtype=torch.bfloat16, device=device)
    spread_VH = with_row_stride(weight_VH, 9_000_000)
    assert spread_VH.stride(0) * 299 > 2**31
    out, expected = head_topk_kernel(x_BH, spread_VH, 4), head_topk_kernel(x_BH, weight_VH, 4)
    assert torch.equal(out.scores_Bk, expected.scores_Bk)
    assert torch.equal(out.ids_Bk, expected.ids_Bk)


def test_rows_may_lie_apart_and_columns_may_not(device: torch.device) -> None:
    wide_BH, weight_VH = drawn(3, 64, dtype=torch.float32, device=device), torch.eye(32, device=device)
    out, expected = head_topk_kernel(wide_BH[:, :32], weight_VH, 2), head_topk_reference(wide_BH[:, :32], weight_VH, 2)
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    with pytest.raises(ValueError, match="contiguous columns"):
        head_topk_kernel(wide_BH[:, :32], weight_VH.T, 2)
    with pytest.raises(ValueError, match="contiguous columns"):
        head_topk_kernel(wide_BH[:, ::2], weight_VH, 2)


def test_what_is_refused(device: torch.device) -> None:
    x_BH, weight_VH = torch.ones(2, 16, device=device), torch.ones(20, 16, device=device)
    with pytest.raises(ValueError, match="16 at most"):
        head_topk_kernel(x_BH, weight_VH, 17)
    with pytest.raises(ValueError, match=r"must be in 1\.\.20"):
        head_topk_reference(x_BH, weight_VH, 21)
    with pytest.raises(ValueError, match="equally wide"):
        head_topk_kernel(x_BH[:, :8], weight_VH, 2)
    with pytest.raises(ValueError, match="dtype of x"):
        head_topk_kernel(x_BH, weight_VH.bfloat16(), 2)
    with pytest.raises(ValueError, match="rows"):
        head_topk_kernel(x_BH[:0], weight_VH, 2)


def test_operator_is_well_formed(device: torch.device) -> None:
    """Schema, fake implementation and tracing, as torch.compile relies on them."""
    x_BH, weight_VH = (
        drawn(2, 16, dtype=torch.float32, device=device),
        drawn(20, 16, dtype=torch.float32, device=device),
    )
    torch.library.opcheck(_head_topk, (x_BH, weight_VH, None, 3, None))


def test_dispatch_gives_the_references_answer(device: torch.device) -> None:
    x_BH, weight_VH = (
        drawn(2, 16, dtype=torch.float32, device=device),
        drawn(20, 16, dtype=torch.float32, device=device),
    )
    for k in (3, 20):  # beyond the kernel's 16 the reference takes over
        exact = head_topk_reference(x_BH.double(), weight_VH.double(), k)
        assert_best(head_topk(x_BH, weight_VH, k), exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)


def test_int4_whose_rows_do_not_begin_at_words_is_refused(interpreter: None) -> None:
    values, scales = quantize_reference(torch.randn(16, 64), "int4")
    shifted = torch.empty(values.numel() + 1, dtype=torch.uint8)[1:].view(values.shape)
    with pytest.raises(ValueError, match=r"read in words of four bytes, but they begin at byte 1 .*contiguous"):
        head_topk_kernel(torch.randn(1, 64), Quantized(shifted, scales), 4)
