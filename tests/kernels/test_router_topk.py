"""DynaSpec's router: scores against float64, the union against Python sets, and what the head makes of it."""

import pytest
import torch
from torch import Tensor

from rayspec_kernels.common.closeness import FLOAT32_SUMS, ROUNDED, assert_best, assert_close, drawn
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference
from rayspec_kernels.router_topk import _router_topk, router_topk
from rayspec_kernels.router_topk.kernel import router_scores_kernel, router_topk_kernel, union_tiles_kernel
from rayspec_kernels.router_topk.reference import Router, most_tiles, router_scores_reference, union_tiles_reference

EPS = 1e-5


def random_router(H: int, R: int, M: int, dtype: torch.dtype, device: torch.device) -> Router:
    return Router(
        drawn(R, 2 * H, dtype=dtype, device=device),
        drawn(R, dtype=dtype, device=device),
        drawn(M, R, dtype=dtype, device=device, seed=1),
        drawn(M, dtype=dtype, device=device, seed=2),
    )


def cluster_starts(M: int, device: torch.device, pinned: int = 3) -> Tensor:
    """A pinned cluster and M routed ones of 1 to 40 tokens."""
    sizes = torch.randint(1, 41, (M,), generator=torch.Generator().manual_seed(M))
    return torch.cat([torch.tensor([0, pinned]), pinned + sizes.cumsum(0)]).int().to(device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "H", "R", "M"), [(1, 1, 1, 1), (3, 37, 19, 21), (17, 32, 16, 16)])
def test_scores_match_float64(B: int, H: int, R: int, M: int, dtype: torch.dtype, device: torch.device) -> None:
    router = random_router(H, R, M, dtype, device)
    # a hundredfold apart, as embeddings and features are: the norms matter
    embed_BH = drawn(B, H, dtype=dtype, device=device) / 8
    feature_BH = drawn(B, H, dtype=dtype, device=device, seed=1) * 16
    wide = Router(*(t.double() for t in router))
    exact_BM = router_scores_reference(embed_BH.double(), feature_BH.double(), wide, EPS)
    scores_BM, marks = router_scores_kernel(embed_BH, feature_BH, router, EPS)
    assert scores_BM.dtype == torch.float32
    assert_close(scores_BM, exact_BM, ROUNDED[dtype])  # the hidden layer is rounded to the dtype
    assert marks.tolist() == [1] + [0] * M


def named_tokens(tiles: Tiles) -> list[int]:
    return [token for first, count in tiles.ranges_t2.tolist() for token in range(first, first + count)]


def fresh_marks(M: int, device: torch.device) -> Tensor:
    return torch.tensor([1] + [0] * M, dtype=torch.int32, device=device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("B", "M", "k", "tile"), [(1, 1, 1, 16), (3, 40, 5, 16), (2, 9, 9, 32)], ids=["ones", "overlapping", "all"]
)
def test_union_is_the_union(B: int, M: int, k: int, tile: int, device: torch.device) -> None:
    scores_BM = drawn(B, M, dtype=torch.float32, device=device)
    starts = cluster_starts(M, device)
    fits = most_tiles(starts, tile, min(M, B * k))
    chosen = {0} | {int(m) + 1 for row in scores_BM.topk(k).indices for m in row}
    expected = [t for c in sorted(chosen) for t in range(int(starts[c]), int(starts[c + 1]))]
    reference = union_tiles_reference(scores_BM, k, starts, tile, fits + 2)
    out = union_tiles_kernel(scores_BM, fresh_marks(M, device), k, starts, tile, fits + 2)
    for tiles in (reference, out):
        assert named_tokens(tiles) == expected
        assert int(tiles.ranges_t2[:, 1].max()) <= tile
    assert torch.equal(out.ranges_t2, reference.ranges_t2)


def test_what_does_not_fit_is_left_out(device: torch.device) -> None:
    scores_BM, starts = drawn(1, 40, dtype=torch.float32, device=device), cluster_starts(40, device)
    whole = union_tiles_reference(scores_BM, 9, starts, 16, most_tiles(starts, 16, 9))
    out = union_tiles_kernel(scores_BM, fresh_marks(40, device), 9, starts, 16, 4)
    assert torch.equal(out.ranges_t2, whole.ranges_t2[:4])


@pytest.mark.parametrize("special", ["ties", "nan"])
def test_equal_and_faulty_scores(special: str, device: torch.device) -> None:
    """Of equal clusters the lowest ones are chosen; a NaN counts as the best."""
    scores_BM = torch.zeros(2, 140, device=device)
    if special == "nan":
        scores_BM[0, 77] = float("nan")
    starts = torch.arange(142, device=device)  # one token each, the pinned one first
    reference = union_tiles_reference(scores_BM, 3, starts, 16, 8)
    out = union_tiles_kernel(scores_BM, fresh_marks(140, device), 3, starts, 16, 8)
    assert named_tokens(out) == named_tokens(reference) == [0, 1, 2, 3, *([78] if special == "nan" else [])]


def test_router_feeds_the_head(device: torch.device) -> None:
    """Both kernels in a row give what both references in a row give."""
    M, H = 24, 32
    starts = cluster_starts(M, device)
    V = int(starts[-1])
    weight_VH, x_BH = drawn(V, H, dtype=torch.bfloat16, device=device), drawn(3, H, dtype=torch.bfloat16, device=device)
    router = random_router(H, 16, M, torch.bfloat16, device)
    members = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(device)
    scores_BM, tiles = router_topk_kernel(x_BH, x_BH, router, 4, starts, 16, most_tiles(starts, 16, 12), EPS)
    expected = union_tiles_reference(scores_BM, 4, starts, 16, most_tiles(starts, 16, 12))
    exact = indexed_head_reference(x_BH.double(), weight_VH.double(), members, 3, expected)
    out = indexed_head_kernel(x_BH, weight_VH, members, 3, tiles)
    assert_best(out, exact, x_BH.double() @ weight_VH.double().T, FLOAT32_SUMS)


def test_what_is_refused(device: torch.device) -> None:
    router, starts = random_router(16, 8, 5, torch.float32, device), cluster_starts(5, device)
    x_BH = torch.ones(1, 16, device=device)
    with pytest.raises(ValueError, match=r"must be in 1\.\.5"):
        router_topk_kernel(x_BH, x_BH, router, 6, starts, 16, 4, EPS)
    with pytest.raises(ValueError, match="7 entries"):
        router_topk_kernel(x_BH, x_BH, router, 2, starts[:-1], 16, 4, EPS)
    with pytest.raises(ValueError, match="in_R2H must be"):
        router_topk_kernel(x_BH[:, :8], x_BH[:, :8], router, 2, starts, 16, 4, EPS)


def test_operator_and_dispatch(device: torch.device) -> None:
    router, starts = random_router(16, 8, 5, torch.float32, device), cluster_starts(5, device)
    x_BH = drawn(2, 16, dtype=torch.float32, device=device)
    torch.library.opcheck(_router_topk, (x_BH, x_BH, *router, 2, starts, 16, 8, EPS))
    scores_BM, tiles = router_topk(x_BH, x_BH, router, 2, starts, 16, 8, EPS)
    assert torch.equal(tiles.ranges_t2, union_tiles_reference(scores_BM, 2, starts, 16, 8).ranges_t2)
