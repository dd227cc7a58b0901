"""DynaSpec's router: scores against float64, the union against Python sets, and what the head makes of it."""

import pytest
import torch
from matrices import with_row_stride
from torch import Tensor

from rayspec_kernels.common.closeness import FLOAT32_SUMS, ROUNDED, assert_best, assert_close, drawn
from rayspec_kernels.common.quantized import FORMATS, Quantized, dequantize_reference, quantize_reference
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles, indexed_head_reference
from rayspec_kernels.router_topk import _router_scores, _union_tiles, router_scores, union_tiles
from rayspec_kernels.router_topk.kernel import router_scores_kernel, router_topk_kernel, union_tiles_kernel
from rayspec_kernels.router_topk.reference import (
    Router,
    can_halve,
    most_tiles,
    router_scores_reference,
    union_tiles_reference,
)

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
    scores_BM = router_scores_kernel(embed_BH, feature_BH, router, EPS)
    assert scores_BM.dtype == torch.float32
    assert_close(scores_BM, exact_BM, ROUNDED[dtype])  # the hidden layer is rounded to the dtype


def quantized_router(
    H: int, R: int, M: int, weight_format: str, dtype: torch.dtype, device: torch.device, group: int = 32
) -> Router:
    """Rows of very different sizes, groups with offsets: a scale or zero of the wrong place shows."""
    router = random_router(H, R, M, dtype, device)
    rounded = []
    for weight in (router.in_R2H, router.out_MR):
        assert isinstance(weight, Tensor)
        N, K = weight.shape
        wide = weight.float() * torch.logspace(-0.5, 0.5, N, device=device)[:, None]
        rounded.append(quantize_reference(wide + torch.linspace(-1, 1, K, device=device), weight_format, group))
    return router._replace(in_R2H=rounded[0], out_MR=rounded[1])


def dequantized(router: Router) -> Router:
    wide = (t if isinstance(t, Tensor) else dequantize_reference(t) for t in router)
    return Router(*(t.double() for t in wide))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("B", "H", "R", "M"), [(1, 32, 32, 1), (3, 96, 64, 21), (17, 64, 32, 16)])
def test_scores_in_fewer_bits_match_float64(
    weight_format: str, B: int, H: int, R: int, M: int, dtype: torch.dtype, device: torch.device
) -> None:
    router = quantized_router(H, R, M, weight_format, dtype, device)
    embed_BH = drawn(B, H, dtype=dtype, device=device) / 8
    feature_BH = drawn(B, H, dtype=dtype, device=device, seed=1) * 16
    exact_BM = router_scores_reference(embed_BH.double(), feature_BH.double(), dequantized(router), EPS)
    assert_close(router_scores_kernel(embed_BH, feature_BH, router, EPS), exact_BM, ROUNDED[dtype])
    torch.testing.assert_close(
        router_scores_reference(embed_BH.double(), feature_BH.double(), router, EPS), exact_BM, rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("formats", [("int8", None), (None, "int4")], ids=["first", "second"])
def test_one_matrix_in_fewer_bits(
    formats: tuple[str | None, str | None], dtype: torch.dtype, device: torch.device
) -> None:
    H, R, M = 33, 32, 5  # rows of int8 and columns of one value a byte need no groups
    router = random_router(H, R, M, dtype, device)
    for name, weight_format in zip(("in_R2H", "out_MR"), formats, strict=True):
        if weight_format is not None:
            router = router._replace(**{name: quantize_reference(getattr(router, name), weight_format, 32)})
    x_BH = drawn(2, H, dtype=dtype, device=device)
    exact_BM = router_scores_reference(x_BH.double(), x_BH.double(), dequantized(router), EPS)
    assert_close(router_scores_kernel(x_BH, x_BH, router, EPS), exact_BM, ROUNDED[dtype])


def test_embeddings_and_features_lie_apart_differently(device: torch.device) -> None:
    """8 divides the width and not all strides, of which the kernel must not be told otherwise."""
    router = random_router(40, 16, 9, torch.float32, device)
    embed_BH = drawn(3, 40, dtype=torch.float32, device=device)
    feature_BH = drawn(3, 40, dtype=torch.float32, device=device, seed=1)
    expected_BM = router_scores_kernel(embed_BH, feature_BH, router, EPS)
    for strides in ((40, 45), (45, 40)):
        apart = (with_row_stride(x, stride) for x, stride in zip((embed_BH, feature_BH), strides, strict=True))
        assert torch.equal(router_scores_kernel(*apart, router, EPS), expected_BM)


def test_groups_that_span_both_halves(device: torch.device) -> None:
    """Columns 64..127 share a scale and belong to both inputs: not the kernel's, and still answered."""
    router = quantized_router(96, 64, 9, "int4", torch.float32, device, group=64)
    assert not can_halve(router.in_R2H)
    x_BH = drawn(2, 96, dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="must not span both halves"):
        router_scores_kernel(x_BH, x_BH, router, EPS)
    exact_BM = router_scores_reference(x_BH.double(), x_BH.double(), dequantized(router), EPS)
    assert_close(router_scores(x_BH, x_BH, router, EPS), exact_BM, ROUNDED[torch.float32])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_faulty_row_and_a_faulty_cluster(weight_format: str, device: torch.device) -> None:
    router = quantized_router(32, 32, 9, weight_format, torch.float32, device)
    x_BH = drawn(3, 32, dtype=torch.float32, device=device)
    x_BH[1, 7] = float("nan")
    assert isinstance(router.out_MR, Quantized)
    router.out_MR.scales[4] = float("inf")
    scores_BM = router_scores_kernel(x_BH.flip(0), x_BH, router, EPS)
    assert scores_BM[1].isnan().all()
    assert scores_BM[[0, 2]].isfinite().all(dim=0).tolist() == [m != 4 for m in range(9)]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_offsets_beyond_32_bits(weight_format: str, device: torch.device) -> None:
    """Row 299 lies 2.7e9 elements from row 0."""
    router = quantized_router(32, 320, 300, weight_format, torch.bfloat16, device)
    x_BH = drawn(2, 32, dtype=torch.bfloat16, device=device)
    far = [Quantized(with_row_stride(w.values, 9_000_000), w.scales) for w in (router.in_R2H, router.out_MR)]
    out_BM = router_scores_kernel(x_BH, x_BH, router._replace(in_R2H=far[0], out_MR=far[1]), EPS)
    assert torch.equal(out_BM, router_scores_kernel(x_BH, x_BH, router, EPS))


def named_tokens(tiles: Tiles) -> list[int]:
    return [token for first, count in tiles.ranges_t2.tolist() for token in range(first, first + count)]


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
    out = union_tiles_kernel(scores_BM, k, starts, tile, fits + 2)
    for tiles in (reference, out):
        assert named_tokens(tiles) == expected
        assert int(tiles.ranges_t2[:, 1].max()) <= tile
    assert torch.equal(out.ranges_t2, reference.ranges_t2)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("B", "groups", "M", "k", "tile"),
    [(4, 2, 40, 5, 16), (3, 3, 9, 2, 32), (6, 3, 9, 9, 16), (70, 70, 21, 3, 16)],
    ids=["rows_share", "each_row_its_own", "all", "many"],
)
def test_ranges_say_which_groups_chose_them(
    B: int, groups: int, M: int, k: int, tile: int, device: torch.device
) -> None:
    scores_BM, starts = drawn(B, M, dtype=torch.float32, device=device), cluster_starts(M, device)
    num_tiles = most_tiles(starts, tile, min(M, B * k)) + 2
    chosen_Gm = (scores_BM.topk(k).indices + 1).view(groups, -1).tolist()
    reference = union_tiles_reference(scores_BM, k, starts, tile, num_tiles, groups)
    out = union_tiles_kernel(scores_BM, k, starts, tile, num_tiles, groups)
    for tiles in (reference, out):
        for group, chosen in enumerate(chosen_Gm):
            expected = [t for c in sorted({0, *chosen}) for t in range(int(starts[c]), int(starts[c + 1]))]
            assert named_tokens(tiles.of_group(group)) == expected
        assert torch.equal(tiles.ranges_t2, union_tiles_reference(scores_BM, k, starts, tile, num_tiles).ranges_t2)
    assert out.is_of_tG is not None
    assert torch.equal(out.is_of_tG, reference.is_of_tG)
    assert not out.is_of_tG[out.ranges_t2[:, 1] == 0].any()
    few = union_tiles_kernel(scores_BM, k, starts, tile, 4, groups)
    assert torch.equal(few.is_of_tG, out.is_of_tG[:4])


def test_what_does_not_fit_is_left_out(device: torch.device) -> None:
    scores_BM, starts = drawn(1, 40, dtype=torch.float32, device=device), cluster_starts(40, device)
    whole = union_tiles_reference(scores_BM, 9, starts, 16, most_tiles(starts, 16, 9))
    out = union_tiles_kernel(scores_BM, 9, starts, 16, 4)
    assert torch.equal(out.ranges_t2, whole.ranges_t2[:4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # a linear router gives scores of its own type
@pytest.mark.parametrize("special", ["ties", "nan"])
def test_equal_and_faulty_scores(special: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of equal clusters the lowest ones are chosen; a NaN counts as the best."""
    scores_BM = torch.zeros(2, 140, dtype=dtype, device=device)
    if special == "nan":
        scores_BM[0, 77] = float("nan")
    starts = torch.arange(142, device=device)  # one token each, the pinned one first
    reference = union_tiles_reference(scores_BM, 3, starts, 16, 8)
    out = union_tiles_kernel(scores_BM, 3, starts, 16, 8)
    assert named_tokens(out) == named_tokens(reference) == [0, 1, 2, 3, *([78] if special == "nan" else [])]


@pytest.mark.parametrize("groups", [1, 3])
def test_router_feeds_the_head(groups: int, device: torch.device) -> None:
    """Both kernels in a row give what both references in a row give."""
    M, H = 24, 32
    starts = cluster_starts(M, device)
    V = int(starts[-1])
    weight_VH, x_BH = drawn(V, H, dtype=torch.bfloat16, device=device), drawn(3, H, dtype=torch.bfloat16, device=device)
    router = random_router(H, 16, M, torch.bfloat16, device)
    members = torch.randperm(V, generator=torch.Generator().manual_seed(1)).to(device)
    num_tiles = most_tiles(starts, 16, 12)
    scores_BM, tiles = router_topk_kernel(x_BH, x_BH, router, 4, starts, 16, num_tiles, EPS, groups)
    expected = union_tiles_reference(scores_BM, 4, starts, 16, num_tiles, groups)
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
    with pytest.raises(ValueError, match="scores must be contiguous"):
        union_tiles_kernel(torch.ones(2, 10, device=device)[:, :5], 2, starts, 16, 4)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"groups must divide the 2 rows, got {groups}"):
            union_tiles_kernel(torch.ones(2, 5, device=device), 2, starts, 16, 4, groups)
    for wrong, message in (
        ({"in_bias_R": router.in_bias_R.half()}, "in_bias_R must be 8 contiguous numbers of torch.float32"),
        ({"in_bias_R": router.in_bias_R[:7]}, "in_bias_R must be 8"),
        ({"out_bias_M": router.out_bias_M[:4]}, "out_bias_M must be 5"),
        ({"in_R2H": torch.ones(8, 30, device=device)}, "equally wide, got 16 and 15"),
        ({"out_MR": torch.ones(5, 8, device=device).half()}, "dtype of x"),
    ):
        with pytest.raises(ValueError, match=message):
            router_scores_kernel(x_BH, x_BH, router._replace(**wrong), EPS)
    with pytest.raises(ValueError, match="shape of embed"):
        router_scores_kernel(x_BH, x_BH[:, :8], router, EPS)


def test_operator_and_dispatch(device: torch.device) -> None:
    router, starts = random_router(16, 8, 5, torch.float32, device), cluster_starts(5, device)
    x_BH = drawn(2, 16, dtype=torch.float32, device=device)
    in_R2H, in_bias_R, out_MR, out_bias_M = router
    torch.library.opcheck(_router_scores, (x_BH, x_BH, in_R2H, None, in_bias_R, out_MR, None, out_bias_M, EPS))
    for groups in (1, 2):
        torch.library.opcheck(_union_tiles, (x_BH, 2, torch.arange(18, device=device), 16, 8, groups))
    few = quantized_router(32, 32, 5, "int8", torch.float32, device)
    wide_BH = drawn(2, 32, dtype=torch.float32, device=device)
    torch.library.opcheck(
        _router_scores, (wide_BH, wide_BH, *few.in_R2H, few.in_bias_R, *few.out_MR, few.out_bias_M, EPS)
    )
    scores_BM = router_scores(x_BH, x_BH, router, EPS)
    for groups in (1, 2):
        tiles = union_tiles(scores_BM, 2, starts, 16, 8, groups)
        expected = union_tiles_reference(scores_BM, 2, starts, 16, 8, groups)
        assert torch.equal(tiles.ranges_t2, expected.ranges_t2)
        assert tiles.is_of_tG is expected.is_of_tG is None or torch.equal(tiles.is_of_tG, expected.is_of_tG)
