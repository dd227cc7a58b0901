"""Numbers that are none are found wherever they stand and in whatever they are stored."""

import pytest
import torch

from sglang_ext.drafters.numbers import check_finite, not_finite

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (16, 17), (36, 40)], ids=["first", "middle", "last"])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float, place: tuple[int, int]) -> None:
    tensor = torch.randn(37, 41, generator=torch.Generator().manual_seed(0))
    assert not_finite({"a": tensor.to(dtype)}) == []
    tensor[place] = bad
    assert not_finite({"a": torch.zeros(2), "b": tensor.to(dtype)}) == ["b"]
    with pytest.raises(ValueError, match="drafter here: b holds NaN or Inf; copy the drafter whole"):
        check_finite({"b": tensor.to(dtype)}, "here")


def test_the_largest_numbers_empty_tensors_and_integers_are_finite() -> None:
    ends = {str(d): torch.tensor([torch.finfo(d).min, torch.finfo(d).max], dtype=torch.float64).to(d) for d in DTYPES}
    assert not_finite({**ends, "empty": torch.empty(0, 3), "one": torch.tensor(1.0), "ids": torch.tensor([-1])}) == []
