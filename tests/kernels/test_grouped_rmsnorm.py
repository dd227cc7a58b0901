"""Grouped RMSNorm, forward and backward, against a loop over slices and float64."""

import pytest
import torch
from torch.nn.functional import rms_norm

from rayspec_kernels.common.closeness import FLOAT32_SUMS, ROUNDED, assert_close, drawn
from rayspec_kernels.grouped_rmsnorm import _grouped_rmsnorm, grouped_rmsnorm
from rayspec_kernels.grouped_rmsnorm.kernel import grouped_rmsnorm_backward_kernel, grouped_rmsnorm_kernel
from rayspec_kernels.grouped_rmsnorm.reference import grouped_rmsnorm_reference

EPS = 1e-5
SHAPES = {"ones": (1, 1, 1), "odd": (3, 5, 77), "one_group": (2, 1, 300), "many_rows": (20, 2, 16)}


def test_reference_is_a_loop_over_slices_and_no_plain_norm() -> None:
    x_NC = torch.randn(3, 12, dtype=torch.float64) * torch.tensor([1.0, 10.0, 100.0]).repeat_interleave(4)
    weight_C = torch.randn(12, dtype=torch.float64)
    slices = [rms_norm(x_NC[:, i : i + 4], (4,), weight_C[i : i + 4], EPS) for i in (0, 4, 8)]
    out = grouped_rmsnorm_reference(x_NC, weight_C, 3, EPS)
    torch.testing.assert_close(out, torch.cat(slices, dim=1))
    assert not torch.allclose(out, rms_norm(x_NC, (12,), weight_C, EPS), rtol=0.1)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("N", "G", "D"), SHAPES.values(), ids=SHAPES.keys())
def test_matches_float64(N: int, G: int, D: int, dtype: torch.dtype, device: torch.device) -> None:
    x_NC, dy_NC = (drawn(N, G * D, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight_C = drawn(G * D, dtype=dtype, device=device)
    wide_x, wide_weight = x_NC.double().requires_grad_(), weight_C.double().requires_grad_()
    exact = grouped_rmsnorm_reference(wide_x, wide_weight, G, EPS)
    exact.backward(dy_NC.double())
    assert wide_x.grad is not None
    assert wide_weight.grad is not None

    y_NC, inverse_NG = grouped_rmsnorm_kernel(x_NC, weight_C, G, EPS)
    assert_close(y_NC, exact.detach(), ROUNDED[dtype])
    dx_NC, dweight_C = grouped_rmsnorm_backward_kernel(dy_NC, x_NC, weight_C, inverse_NG)
    if D > 1:  # a single column is normalised to its sign, and its gradient is rounding
        assert_close(dx_NC, wide_x.grad, ROUNDED[dtype])
    assert_close(dweight_C[None], wide_weight.grad[None], ROUNDED[dtype])


def test_gradient_is_that_of_the_forward_pass(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NC = torch.randn(3, 10, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    weight_C = torch.randn(10, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    torch.autograd.gradcheck(lambda x, w: _grouped_rmsnorm(x, w, 2, EPS)[0], (x_NC, weight_C))


def test_groups_do_not_mix(device: torch.device) -> None:
    x_NC = drawn(2, 24, dtype=torch.float32, device=device)
    weight_C, changed_NC = torch.ones(24, device=device), x_NC.clone()
    x_NC[0, 3] = float("nan")
    changed_NC[0, 3] = float("inf")
    clean = grouped_rmsnorm_kernel(drawn(2, 24, dtype=torch.float32, device=device), weight_C, 3, EPS)[0]
    for spoiled in (x_NC, changed_NC):
        y_NC = grouped_rmsnorm_kernel(spoiled, weight_C, 3, EPS)[0]
        assert torch.equal(y_NC[:, 8:], clean[:, 8:])
        assert torch.equal(y_NC[1], clean[1])
        assert y_NC[0, 3].isnan()


def test_rows_may_lie_apart_and_columns_may_not(device: torch.device) -> None:
    wide, weight_C = drawn(3, 24, dtype=torch.float32, device=device), drawn(12, dtype=torch.float32, device=device)
    expected = grouped_rmsnorm_reference(wide[:, :12].double(), weight_C.double(), 3, EPS)
    assert_close(grouped_rmsnorm_kernel(wide[:, :12], weight_C, 3, EPS)[0], expected, FLOAT32_SUMS)
    with pytest.raises(ValueError, match="contiguous columns"):
        grouped_rmsnorm_kernel(wide[:, ::2], weight_C, 3, EPS)


@pytest.mark.parametrize("groups", [0, 5])
def test_groups_that_do_not_divide_are_refused(groups: int, device: torch.device) -> None:
    with pytest.raises(ValueError, match="groups must divide"):
        grouped_rmsnorm_kernel(torch.ones(2, 12, device=device), torch.ones(12, device=device), groups, EPS)


def test_operator_and_dispatch(device: torch.device) -> None:
    x_NC, weight_C = drawn(2, 12, dtype=torch.float32, device=device), drawn(12, dtype=torch.float32, device=device)
    torch.library.opcheck(_grouped_rmsnorm, (x_NC.clone().requires_grad_(), weight_C.clone().requires_grad_(), 3, EPS))
    expected = grouped_rmsnorm_reference(x_NC.double(), weight_C.double(), 3, EPS)
    assert_close(grouped_rmsnorm(x_NC, weight_C, 3, EPS), expected, FLOAT32_SUMS)
