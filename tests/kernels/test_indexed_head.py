"""The head over a shared set of rows: lists, ranges of a list, and matrices stored in the list's order."""

import pytest
import torch
from matrices import whole_numbers, with_row_stride
from torch import Tensor

from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best, drawn
from rayspec_kernels.head_topk.reference import head_topk_reference
from rayspec_kernels.indexed_head import _indexed_head, indexed_head
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, chosen_places, indexed_head_reference

V, H = 300, 48


def shuffled(device: torch.device) -> Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(0)).int().to(device)


def ranges(*pairs: tuple[int, int], size: int, device: torch.device) -> Tiles:
    return Tiles(torch.tensor(pairs, dtype=torch.int32, device=device), size)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "n", "padding", "k"), [(1, 1, 0, 1), (3, 129, 0, 5), (2, 150, 90, 4)], ids=["ones", "odd", "padded_tiles"]
)
def test_list_matches_float64(B: int, n: int, padding: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    x_BH, weight_VH = drawn(B, H, dtype=dtype, device=device), drawn(V, H, dtype=dtype, device=device, seed=1)
    ids_L = torch.cat([shuffled(device)[:n].sort().values, torch.full((padding,), -1, device=device).int()])
    exact = indexed_head_reference(x_BH.double(), weight_VH.double(), ids_L, k)
    out = indexed_head_kernel(x_BH, weight_VH, ids_L, k)
    assert_best(out, exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)
    assert set(out.ids_Bk.flatten().tolist()) <= set(ids_L.tolist()) - {-1}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_listed_order", [False, True], ids=["by_id", "in_the_lists_order"])
def test_ranges_match_float64(is_listed_order: bool, device: torch.device) -> None:
    x_BH, ids_L = drawn(3, H, dtype=torch.bfloat16, device=device), shuffled(device)
    weight_VH = drawn(V, H, dtype=torch.bfloat16, device=device, seed=1)
    stored_VH = weight_VH[ids_L.long()].contiguous() if is_listed_order else weight_VH
    tiles = ranges((3, 16), (19, 5), (290, 10), (0, 0), (0, 0), size=16, device=device)
    exact = indexed_head_reference(x_BH.double(), stored_VH.double(), ids_L, 4, tiles, is_listed_order)
    out = indexed_head_kernel(x_BH, stored_VH, ids_L, 4, tiles, is_listed_order)
    assert_best(out, exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)
    named = [*range(3, 24), *range(290, 300)]
    assert chosen_places(tiles).tolist() == named + [-1] * (5 * 16 - len(named))
    assert set(out.ids_Bk.flatten().tolist()) <= set(ids_L[torch.tensor(named)].tolist())


def test_all_rows_are_the_dense_head(device: torch.device) -> None:
    x_BH = whole_numbers(2, H, dtype=torch.float32, device=device)
    weight_VH = whole_numbers(V, H, dtype=torch.float32, device=device)
    expected = head_topk_reference(x_BH, weight_VH, 6)
    every = torch.arange(V, device=device, dtype=torch.int32)
    for out in (
        indexed_head_kernel(x_BH, weight_VH, every, 6),
        indexed_head_kernel(x_BH, weight_VH, every, 6, ranges(*((i, 32) for i in range(0, 288, 32)), (288, 12),
                                                             size=32, device=device)),
    ):  # fmt: skip
        assert torch.equal(out.ids_Bk, expected.ids_Bk)
        torch.testing.assert_close(out.log_norm_B, expected.log_norm_B)


def test_fewer_candidates_than_are_kept(device: torch.device) -> None:
    """What is missing has score -inf and id -1; with nothing at all the normaliser is -inf."""
    x_BH, weight_VH = drawn(2, H, dtype=torch.float32, device=device), drawn(V, H, dtype=torch.float32, device=device)
    every = torch.arange(V, device=device, dtype=torch.int32)
    for pairs in (((7, 2), (0, 0)), ((0, 0), (0, 0))):
        tiles = ranges(*pairs, size=16, device=device)
        out = indexed_head_kernel(x_BH, weight_VH, every, 4, tiles)
        expected = indexed_head_reference(x_BH, weight_VH, every, 4, tiles)
        assert torch.equal(out.ids_Bk, expected.ids_Bk)
        assert out.ids_Bk[:, pairs[0][1] :].eq(-1).all()
        torch.testing.assert_close(out.scores_Bk, expected.scores_Bk)
        torch.testing.assert_close(out.log_norm_B, expected.log_norm_B)


def test_equal_scores_go_to_the_first_listed(device: torch.device) -> None:
    x_BH = whole_numbers(2, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(V, 16, dtype=torch.bfloat16, device=device)
    ids_L = shuffled(device)
    expected = indexed_head_reference(x_BH.double(), weight_VH.double(), ids_L, 9)
    assert len(expected.scores_Bk[0].unique()) < 9
    assert torch.equal(indexed_head_kernel(x_BH, weight_VH, ids_L, 9).ids_Bk, expected.ids_Bk)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    x_BH, weight_VH = drawn(1, H, dtype=torch.float16, device=device), drawn(V, H, dtype=torch.float16, device=device)
    spread_VH, ids_L = with_row_stride(weight_VH, 9_000_000), torch.tensor([0, 298, 299], device=device)
    out, expected = indexed_head_kernel(x_BH, spread_VH, ids_L, 3), indexed_head_kernel(x_BH, weight_VH, ids_L, 3)
    assert torch.equal(out.scores_Bk, expected.scores_Bk)


def test_what_is_refused(device: torch.device) -> None:
    x_BH, weight_VH = torch.ones(1, 16, device=device), torch.ones(40, 16, device=device)
    ids_L = torch.arange(40, device=device)
    with pytest.raises(ValueError, match="size of a tile"):
        indexed_head_kernel(x_BH, weight_VH, ids_L, 2, ranges((0, 3), size=24, device=device))
    with pytest.raises(ValueError, match="ids must be contiguous"):
        indexed_head_kernel(x_BH, weight_VH, ids_L[::2], 2)
    with pytest.raises(ValueError, match="each of the 40 rows"):
        indexed_head_kernel(x_BH, weight_VH, ids_L[:20], 2, is_listed_order=True)


def test_operator_and_dispatch(device: torch.device) -> None:
    x_BH, weight_VH = drawn(2, H, dtype=torch.float32, device=device), drawn(V, H, dtype=torch.float32, device=device)
    ids_L, tiles = shuffled(device), ranges((3, 16), (40, 7), size=16, device=device)
    torch.library.opcheck(_indexed_head, (x_BH, weight_VH, None, ids_L, 3, tiles.ranges_t2, 16))
    exact = indexed_head_reference(x_BH.double(), weight_VH.double(), ids_L, 3, tiles)
    out = indexed_head(x_BH, weight_VH, ids_L, 3, tiles)
    assert_best(out, exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)
