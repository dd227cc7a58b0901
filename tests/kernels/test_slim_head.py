"""SlimSpec's fused head against float64."""

import pytest
import torch
from matrices import whole_numbers

from rayspec_kernels.common.closeness import ROUNDED, assert_best, assert_close, drawn
from rayspec_kernels.quantized_linear.kernel import linear_kernel
from rayspec_kernels.slim_head import _slim_head, slim_head
from rayspec_kernels.slim_head.kernel import slim_head_kernel
from rayspec_kernels.slim_head.reference import slim_head_reference


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "V", "H", "r", "k"), [(1, 1, 1, 1, 1), (3, 157, 70, 19, 5), (18, 40, 64, 16, 2)], ids=["ones", "odd", "batch"]
)
def test_matches_float64(B: int, V: int, H: int, r: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x_BH, down_rH = drawn(B, H, dtype=dtype, device=device), drawn(r, H, dtype=dtype, device=device, seed=1)
    up_Vr = drawn(V, r, dtype=dtype, device=device, seed=2)
    exact = slim_head_reference(x_BH.double(), down_rH.double(), up_Vr.double(), k)
    scores_BV = x_BH.double() @ down_rH.double().T @ up_Vr.double().T
    # what lies between the projections is rounded to the dtype
    assert_best(slim_head_kernel(x_BH, down_rH, up_Vr, k), exact, scores_BV, ROUNDED[dtype])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("B", "N", "H"), [(1, 17, 300), (19, 16, 33)])
def test_projection_in_front(B: int, N: int, H: int, device: torch.device) -> None:
    x_BH = drawn(B, H, dtype=torch.bfloat16, device=device)
    weight_NH = drawn(N, H, dtype=torch.bfloat16, device=device)
    assert_close(linear_kernel(x_BH, weight_NH), x_BH.double() @ weight_NH.double().T, ROUNDED[torch.bfloat16])


def test_equal_scores_go_to_the_lowest_id(device: torch.device) -> None:
    x_BH = whole_numbers(2, 16, dtype=torch.bfloat16, device=device)
    down_rH = whole_numbers(3, 16, dtype=torch.bfloat16, device=device)  # sums up to 64: exact in bfloat16
    up_Vr = whole_numbers(260, 3, dtype=torch.bfloat16, device=device)
    expected = slim_head_reference(x_BH.double(), down_rH.double(), up_Vr.double(), 8)
    assert len(expected.scores_Bk[0].unique()) < 8
    assert torch.equal(slim_head_kernel(x_BH, down_rH, up_Vr, 8).ids_Bk, expected.ids_Bk)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nan_reaches_its_own_row_only(device: torch.device) -> None:
    x_BH = drawn(3, 16, dtype=torch.float32, device=device)
    x_BH[1, 5] = float("nan")
    down_rH, up_Vr = drawn(4, 16, dtype=torch.float32, device=device), drawn(9, 4, dtype=torch.float32, device=device)
    out = slim_head_kernel(x_BH, down_rH, up_Vr, 2)
    assert out.scores_Bk.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert out.log_norm_B.isnan().tolist() == [False, True, False]
    assert out.ids_Bk[1].tolist() == [0, 1]


def test_what_is_refused(device: torch.device) -> None:
    x_BH, down_rH, up_Vr = (torch.ones(shape, device=device) for shape in ((2, 16), (4, 16), (9, 4)))
    with pytest.raises(ValueError, match="equally wide"):
        slim_head_kernel(x_BH, down_rH, torch.ones(9, 5, device=device), 2)
    with pytest.raises(ValueError, match="contiguous columns"):
        slim_head_kernel(x_BH, down_rH.T.contiguous().T, up_Vr, 2)


def test_operator_and_dispatch(device: torch.device) -> None:
    x_BH, down_rH = drawn(2, 16, dtype=torch.float32, device=device), drawn(4, 16, dtype=torch.float32, device=device)
    up_Vr = drawn(20, 4, dtype=torch.float32, device=device)
    torch.library.opcheck(_slim_head, (x_BH, down_rH, None, up_Vr, None, 3))
    exact = slim_head_reference(x_BH.double(), down_rH.double(), up_Vr.double(), 3)
    scores_BV = x_BH.double() @ down_rH.double().T @ up_Vr.double().T
    assert_best(slim_head(x_BH, down_rH, up_Vr, 3), exact, scores_BV, ROUNDED[torch.float32])
