"""The k best of written logits, against the same from PyTorch."""

import pytest
import torch

from rayspec_kernels.common.best import best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best, drawn
from rayspec_kernels.common.logits_topk import logits_topk


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("B", "V", "k"), [(1, 1024, 1), (3, 2500, 8), (2, 9, 9), (1, 4097, 16)])
def test_several_tiles_and_a_rest(B: int, V: int, k: int, device: torch.device) -> None:
    logits_BV = drawn(B, V, dtype=torch.float32, device=device)
    assert_best(logits_topk(logits_BV, k), best_reference(logits_BV.double(), k), logits_BV.double(), FLOAT32_SUMS)


def test_rows_may_lie_apart_and_ties_go_to_the_lowest_id(device: torch.device) -> None:
    logits_BV = torch.zeros(2, 3000, device=device)[:, :2000]
    logits_BV[1, 1500] = logits_BV[1, 700] = 5.0
    found = logits_topk(logits_BV, 3)
    assert found.ids_Bk.tolist() == [[0, 1, 2], [700, 1500, 0]]


def test_k_out_of_range_is_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"k must be in 1\.\.9 .*got 10"):
        logits_topk(torch.zeros(1, 9, device=device), 10)


def test_layouts_that_it_would_misread_are_refused(device: torch.device) -> None:
    for logits in (torch.arange(6.0, device=device).view(3, 2).T, torch.zeros(9, device=device)):
        with pytest.raises(ValueError, match="logits must have two dimensions, rows and contiguous columns"):
            logits_topk(logits, 1)
