"""Programs that go over several tiles each, against the same answer from a tile a program."""

from functools import cache

import pytest
import torch

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best, drawn, whole_numbers
from rayspec_kernels.common.score_tiles import score_tiles
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference

TILE = 16


def assert_same(out: Best, expected: Best) -> None:
    """Scores come from the same products, so that they and the ids are equal; sums of exponentials round otherwise."""
    assert torch.equal(out.ids_Bk, expected.ids_Bk)
    torch.testing.assert_close(out.scores_Bk, expected.scores_Bk, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out.log_norm_B, expected.log_norm_B, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 3, 9, 50])
@pytest.mark.parametrize(
    ("B", "k"), [(1, 1), (3, 5), (17, 8), (2, 16)], ids=["greedy", "padded_k", "batch_of_32", "most"]
)
def test_any_number_of_programs(B: int, k: int, programs: int, device: torch.device) -> None:
    """150 candidates are ten tiles, the last with a rest."""
    x_BH, weight_VH, a_tile_each = case_of_ten_tiles(B, k, device)
    out = score_tiles(x_BH, weight_VH, k, tile=TILE, programs=programs)
    scores_BV = x_BH.double() @ weight_VH.double().T
    assert_best(out, best_reference(scores_BV, k), scores_BV, FLOAT32_SUMS)
    assert_same(out, a_tile_each)


@cache
def case_of_ten_tiles(B: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Best]:
    """Also what ten programs make of it."""
    x_BH = drawn(B, 32, dtype=torch.float32, device=device)
    weight_VH = drawn(150, 32, dtype=torch.float32, device=device, seed=1)
    return x_BH, weight_VH, score_tiles(x_BH, weight_VH, k, tile=TILE, programs=10)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
@pytest.mark.parametrize("programs", [1, 3])
def test_the_best_may_come_early_or_late(programs: int, order: int, device: torch.device) -> None:
    """Falling scores: no tile after the first one brings anything. Rising ones: each tile replaces all."""
    scores_V = order * torch.arange(160, dtype=torch.float32, device=device)
    out = score_tiles(torch.ones(1, 1, device=device), scores_V[:, None], 8, tile=TILE, programs=programs)
    assert out.scores_Bk[0].tolist() == sorted(scores_V.tolist(), reverse=True)[:8]
    torch.testing.assert_close(out.log_norm_B, scores_V.logsumexp(dim=0, keepdim=True))


@pytest.mark.parametrize("programs", [1, 2])
def test_equal_scores_go_to_the_lowest_id(programs: int, device: torch.device) -> None:
    x_BH = whole_numbers(4, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(300, 16, dtype=torch.bfloat16, device=device)
    expected = best_reference(x_BH.double() @ weight_VH.double().T, 9)
    assert len(expected.scores_Bk[0].unique()) < 9, "no ties: the test would show nothing"
    assert torch.equal(score_tiles(x_BH, weight_VH, 9, tile=TILE, programs=programs).ids_Bk, expected.ids_Bk)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf"), -1e30, 1e30])
@pytest.mark.parametrize("where", [0, 40, 79])
def test_faults_in_any_of_the_tiles(where: int, fault: float, device: torch.device) -> None:
    scores_V = drawn(80, dtype=torch.float32, device=device)
    scores_V[where] = fault
    for programs in (1, 2):
        out = score_tiles(torch.ones(1, 1, device=device), scores_V[:, None], 3, tile=TILE, programs=programs)
        expected = best_reference(scores_V[None].double(), 3)
        assert torch.equal(out.ids_Bk, expected.ids_Bk)
        torch.testing.assert_close(out.log_norm_B.double(), expected.log_norm_B, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_all_scores_minus_infinity(device: torch.device) -> None:
    weight_VH = torch.full((80, 1), float("-inf"), device=device)
    out = score_tiles(torch.ones(1, 1, device=device), weight_VH, 3, tile=TILE, programs=2)
    assert out.ids_Bk.tolist() == [[0, 1, 2]]
    assert out.log_norm_B.tolist() == [float("-inf")]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("programs", [1, 2, 4])
def test_ranges_in_any_order_and_empty_ones(programs: int, device: torch.device) -> None:
    """A program whose ranges are all empty leaves an empty list; so does each of them where none is left."""
    x_BH, weight_VH = drawn(2, 8, dtype=torch.float32, device=device), drawn(90, 8, dtype=torch.float32, device=device)
    ids_L = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    ranges_t2 = torch.tensor([[64, 16], [0, 3], [80, 10], [5, 0], [30, 16], [90, 0]], dtype=torch.int32, device=device)
    for is_gathered in (True, False):
        out = score_tiles(
            x_BH, weight_VH, 4, ids_L=ids_L, is_gathered=is_gathered, tiles_t2=ranges_t2, tile=TILE, programs=programs
        )  # fmt: skip
        expected = indexed_head_reference(x_BH, weight_VH, ids_L, 4, Tiles(ranges_t2, TILE), not is_gathered)
        assert torch.equal(out.ids_Bk, expected.ids_Bk)
        torch.testing.assert_close(out.log_norm_B, expected.log_norm_B)
    none = score_tiles(x_BH, weight_VH, 4, tiles_t2=torch.zeros_like(ranges_t2), tile=TILE, programs=programs)
    assert none.ids_Bk.tolist() == [[-1] * 4] * 2
    assert none.log_norm_B.tolist() == [float("-inf")] * 2


def test_two_programs_a_multiprocessor_by_default(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches have a tile a program: the lists of their rows would not fit into registers."""
    from rayspec_kernels.common import score_tiles as module

    seen = []
    best_buffers = module.best_buffers
    monkeypatch.setattr(module, "best_buffers", lambda *args: seen.append(args[2]) or best_buffers(*args))
    monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    weight_VH = drawn(150, 8, dtype=torch.float32, device=device)
    for B in (1, 16, 17):
        score_tiles(drawn(B, 8, dtype=torch.float32, device=device), weight_VH, 2, tile=TILE)
    assert seen == [6, 6, 10]
