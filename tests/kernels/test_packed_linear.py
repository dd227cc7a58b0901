"""The packed projection against torch in float64; sizes with one row, odd ones, and both sides of the threshold."""

import pytest
import torch

from rayspec_kernels.cpu.packed_linear import PackedLinear, can_pack

# float32 products of K terms of size 1: the error grows as sqrt(K) * 2^-24; eight times that leaves room for blocking
RELATIVE = 8 * 2.0**-24


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize(("N", "K"), [(7, 3), (129, 65), (4100, 256)], ids=["tiny", "odd", "beyond_threshold"])
def test_matches_reference(rows: int, N: int, K: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(N, K, generator=generator), torch.randn(rows, K, generator=generator)
    exact = x.double() @ weight.double().T
    error = (PackedLinear(weight)(x).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < RELATIVE * K**0.5


def test_bias() -> None:
    weight, x, bias = torch.randn(9, 4), torch.randn(3, 4), torch.randn(9)
    torch.testing.assert_close(PackedLinear(weight)(x, bias), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_only_float32_on_the_cpu_is_packed() -> None:
    assert can_pack(torch.ones(2, 2))
    assert not can_pack(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not can_pack(torch.ones(2))
    assert not can_pack(torch.ones(2, 2, device="meta"))
