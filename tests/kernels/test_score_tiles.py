"""Where among many small tiles the best, the faults and the named candidates may lie."""

import pytest
import torch

from rayspec_kernels.common.best import best_reference
from rayspec_kernels.common.closeness import drawn
from rayspec_kernels.common.score_tiles import score_tiles
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference

TILE = 16


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_one_tile_may_hold_all_of_the_best(order: int, device: torch.device) -> None:
    """The last one, where scores rise, or the first."""
    scores_V = order * torch.arange(160, dtype=torch.float32, device=device)
    out = score_tiles(torch.ones(1, 1, device=device), scores_V[:, None], 8, tile=TILE)
    assert out.scores_Bk[0].tolist() == sorted(scores_V.tolist(), reverse=True)[:8]
    torch.testing.assert_close(out.log_norm_B, scores_V.logsumexp(dim=0, keepdim=True))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf"), -1e30, 1e30])
@pytest.mark.parametrize("where", [0, 40, 79])
def test_faults_in_any_of_the_tiles(where: int, fault: float, device: torch.device) -> None:
    scores_V = drawn(80, dtype=torch.float32, device=device)
    scores_V[where] = fault
    out = score_tiles(torch.ones(1, 1, device=device), scores_V[:, None], 3, tile=TILE)
    expected = best_reference(scores_V[None].double(), 3)
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    torch.testing.assert_close(out.log_norm_B.double(), expected.log_norm_B, equal_nan=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_ranges_in_any_order_and_empty_ones(groups: int, is_gathered: bool, device: torch.device) -> None:
    x_BH, weight_VH = drawn(2, 8, dtype=torch.float32, device=device), drawn(90, 8, dtype=torch.float32, device=device)
    ids_L = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    ranges_t2 = torch.tensor([[64, 16], [0, 3], [80, 10], [5, 0], [30, 16], [90, 0]], dtype=torch.int32, device=device)
    is_of_tG = torch.tensor([[1, 0], [1, 1], [0, 0], [1, 1], [0, 1], [0, 0]], dtype=torch.int8, device=device)
    tiles = Tiles(ranges_t2, TILE, is_of_tG if groups == 2 else None)
    out = score_tiles(
        x_BH, weight_VH, 4, ids_L=ids_L, is_gathered=is_gathered, tiles_t2=ranges_t2, tile=TILE, is_of_tG=tiles.is_of_tG
    )
    expected = indexed_head_reference(x_BH, weight_VH, ids_L, 4, tiles, not is_gathered)
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    torch.testing.assert_close(out.log_norm_B, expected.log_norm_B)
