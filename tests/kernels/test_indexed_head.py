"""The head over a shared set of rows: lists, ranges of a list, and matrices stored in the list's order."""

import pytest
import torch
from matrices import whole_numbers, with_row_stride
from torch import Tensor

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best, drawn
from rayspec_kernels.head_topk.reference import head_topk_reference
from rayspec_kernels.indexed_head import _indexed_head, indexed_head
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, chosen_places, indexed_head_reference

V, H = 300, 48
# of the tiles of `of_groups`: all score the first one and none the fifth; the third and the last are empty
RANGES = ((0, 3), (3, 16), (19, 0), (40, 7), (60, 16), (76, 1), (290, 10), (0, 0))


def shuffled(device: torch.device) -> Tensor:
    return torch.randperm(V, generator=torch.Generator().manual_seed(0)).int().to(device)


def ranges(*pairs: tuple[int, int], size: int, device: torch.device) -> Tiles:
    return Tiles(torch.tensor(pairs, dtype=torch.int32, device=device), size)


def of_groups(groups: int, device: torch.device) -> Tiles:
    is_of_tG = torch.randint(2, (len(RANGES), groups), generator=torch.Generator().manual_seed(groups))
    is_of_tG[0], is_of_tG[4] = 1, 0
    is_of_tG[1, -1] = 1  # four candidates for someone at least
    return Tiles(*ranges(*RANGES, size=16, device=device)[:2], is_of_tG.to(device, torch.int8))


def places_of(tiles: Tiles, group: int) -> list[int]:
    """The places in the list that count for a group."""
    assert tiles.is_of_tG is not None
    chosen = [pair for pair, is_of in zip(tiles.ranges_t2.tolist(), tiles.is_of_tG[:, group], strict=True) if is_of]
    return [place for first, count in chosen for place in range(first, first + count)]


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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_listed_order", [False, True], ids=["by_id", "in_the_lists_order"])
@pytest.mark.parametrize(
    ("B", "groups"),
    [(6, 1), (6, 2), (6, 6), (40, 5)],
    ids=["one_group", "rows_share", "each_row_its_own", "a_block_of_rows_without_some_of_the_groups"],
)
def test_a_range_counts_for_the_groups_that_it_is_of(
    B: int, groups: int, is_listed_order: bool, device: torch.device
) -> None:
    x_BH, ids_L = drawn(B, H, dtype=torch.float32, device=device), shuffled(device)
    weight_VH = drawn(V, H, dtype=torch.float32, device=device, seed=1)
    stored_VH = weight_VH[ids_L.long()].contiguous() if is_listed_order else weight_VH
    tiles = of_groups(groups, device)
    out = indexed_head_kernel(x_BH, stored_VH, ids_L, 3, tiles, is_listed_order)
    reference = indexed_head_reference(x_BH.double(), stored_VH.double(), ids_L, 3, tiles, is_listed_order)
    scores_BV = x_BH.double() @ weight_VH.double().T
    for b in range(B):
        ids_n = ids_L[places_of(tiles, b // (B // groups))].long()
        exact = best_reference(scores_BV[b : b + 1, ids_n], 3)
        exact = exact._replace(ids_Bk=ids_n[exact.ids_Bk])
        assert_best(Best(*(part[b : b + 1] for part in out)), exact, scores_BV[b : b + 1], FLOAT32_SUMS)
        for part, expected in zip(reference, exact, strict=True):
            torch.testing.assert_close(part[b : b + 1], expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_faults_of_what_others_chose_do_not_show(fault: float, device: torch.device) -> None:
    x_BH, weight_VH = drawn(2, H, dtype=torch.float32, device=device), drawn(V, H, dtype=torch.float32, device=device)
    every = torch.arange(V, device=device, dtype=torch.int32)
    weight_VH[20] = fault
    tiles = ranges((0, 16), (16, 16), size=16, device=device)
    tiles = tiles._replace(is_of_tG=torch.tensor([[1, 1], [0, 1]], dtype=torch.int8, device=device))
    out = indexed_head_kernel(x_BH, weight_VH, every, 4, tiles)
    expected = indexed_head_reference(x_BH, weight_VH, every, 4, tiles)
    assert expected.log_norm_B.isfinite().tolist() == [True, False]
    assert torch.equal(out.ids_Bk[0], expected.ids_Bk[0])
    torch.testing.assert_close(out.scores_Bk[0], expected.scores_Bk[0])
    torch.testing.assert_close(out.log_norm_B[0], expected.log_norm_B[0])


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


def test_fewer_candidates_than_are_kept_in_some_groups(device: torch.device) -> None:
    """Two, nothing at all, and as many as are kept."""
    x_BH, weight_VH = drawn(6, H, dtype=torch.float32, device=device), drawn(V, H, dtype=torch.float32, device=device)
    every = torch.arange(V, device=device, dtype=torch.int32)
    tiles = ranges((7, 2), (30, 4), (0, 0), size=16, device=device)
    tiles = tiles._replace(is_of_tG=torch.tensor([[1, 0, 0], [0, 0, 1], [1, 1, 1]], dtype=torch.int8, device=device))
    out = indexed_head_kernel(x_BH, weight_VH, every, 4, tiles)
    expected = indexed_head_reference(x_BH, weight_VH, every, 4, tiles)
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    assert out.ids_Bk.ge(0).sum(dim=1).tolist() == [2, 2, 0, 0, 4, 4]
    torch.testing.assert_close(out.scores_Bk, expected.scores_Bk)
    torch.testing.assert_close(out.log_norm_B, expected.log_norm_B)
    assert out.log_norm_B[2:4].eq(-torch.inf).all()


def test_equal_scores_go_to_the_first_listed_of_a_group(device: torch.device) -> None:
    x_BH = whole_numbers(6, 16, dtype=torch.bfloat16, device=device)
    weight_VH, ids_L = whole_numbers(V, 16, dtype=torch.bfloat16, device=device), shuffled(device)
    tiles = of_groups(2, device)
    expected = indexed_head_reference(x_BH.double(), weight_VH.double(), ids_L, 9, tiles)
    assert all(len(scores_k.unique()) < 9 for scores_k in expected.scores_Bk)
    assert torch.equal(indexed_head_kernel(x_BH, weight_VH, ids_L, 9, tiles).ids_Bk, expected.ids_Bk)


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
    tiles, x_BH = ranges((0, 3), (5, 1), size=16, device=device), torch.ones(4, 16, device=device)
    every = torch.ones(6, 3, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match="the groups of tiles must be contiguous"):
        indexed_head_kernel(x_BH, weight_VH, ids_L, 2, tiles._replace(is_of_tG=every[:2, :2]))
    for wrong in (every[:2], every, every.view(-1)[:6].view(6, 1), every[:2, :0].contiguous()):
        with pytest.raises(ValueError, match="each of the 2 tiles must say which groups of as many of the 4 rows"):
            indexed_head_kernel(x_BH, weight_VH, ids_L, 2, tiles._replace(is_of_tG=wrong))


def test_operator_and_dispatch(device: torch.device) -> None:
    x_BH, weight_VH = drawn(2, H, dtype=torch.float32, device=device), drawn(V, H, dtype=torch.float32, device=device)
    ids_L, tiles = shuffled(device), ranges((3, 16), (40, 7), size=16, device=device)
    is_of_tG = torch.tensor([[1, 0], [1, 1]], dtype=torch.int8, device=device)
    for is_of in (None, is_of_tG):
        torch.library.opcheck(_indexed_head, (x_BH, weight_VH, None, ids_L, 3, tiles.ranges_t2, 16, is_of))
    exact = indexed_head_reference(x_BH.double(), weight_VH.double(), ids_L, 3, tiles)
    out = indexed_head(x_BH, weight_VH, ids_L, 3, tiles)
    assert_best(out, exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)
