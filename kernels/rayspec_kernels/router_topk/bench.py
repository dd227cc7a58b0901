"""router_topk: 2 H R + R M weights, as many multiply-adds a row, and M scores a row; the rest is bookkeeping.

Llama-3.1-8B with R = 1024 and M = 512: 17.8 MB in bf16, 4 us at an H200's 4.3 TB/s, half of that in int8 and fp8 and
0.28 of it in int4 with groups of 64. It is four dependent launches of a graph and a cleared buffer; the first two are
hidden by a second stream behind the drafter's layer.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): in bf16 34 us at B = 1 against torch's 107, and 54 at
B = 64 against 121. Fewer bits are slower: 37 and 59 in int8, 42 and 65 in fp8, 137 and 204 in int4. Nobody has timed
the launches one by one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.closeness import ROUNDED, assert_close
from rayspec_kernels.common.inputs import DTYPE, formats, random, random_weight, stored_bytes
from rayspec_kernels.common.quantized import dequantize_reference
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.indexed_head.reference import Tiles
from rayspec_kernels.router_topk.kernel import router_topk_kernel
from rayspec_kernels.router_topk.reference import (
    Router,
    most_tiles,
    router_scores_reference,
    router_topk_reference,
    union_tiles_reference,
)

_EPS = 1e-5
_TILE = 64  # as clustered heads have it


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    R = min(1024, 2 * shape.hidden)
    for weight_format in formats(shape.hidden, R):
        yield _case(shape, batch, R, weight_format, groups=1)
    if batch > 1:
        yield _case(shape, batch, R, "bf16", groups=batch)


def _case(shape: Shape, batch: int, R: int, weight_format: str, groups: int) -> Case:
    V, H = shape.vocab, shape.hidden
    M = min(512, max(1, V // 8))
    k = max(1, M * 28 // 128)
    starts = torch.cat([torch.zeros(1), torch.linspace(1, V, M + 1)]).int()
    num_tiles = most_tiles(starts, _TILE, min(M, batch * k))
    weights = stored_bytes(R, 2 * H, weight_format) + stored_bytes(M, R, weight_format)

    def make(generator: torch.Generator) -> Inputs:
        router = Router(
            random_weight(generator, R, 2 * H, weight_format),
            random(generator, R),
            random_weight(generator, M, R, weight_format),
            random(generator, M),
        )
        return random(generator, batch, H), random(generator, batch, H), router, starts.to(generator.device)

    def kernel(embed_BH: Tensor, feature_BH: Tensor, router: Router, starts: Tensor) -> tuple[Tensor, Tiles]:
        return router_topk_kernel(embed_BH, feature_BH, router, k, starts, _TILE, num_tiles, _EPS, groups)

    def composition(embed_BH: Tensor, feature_BH: Tensor, router: Router, starts: Tensor) -> tuple[Tensor, Tiles]:
        return router_topk_reference(embed_BH, feature_BH, router, k, starts, _TILE, num_tiles, _EPS, groups)

    def check(inputs: Inputs, out: tuple[Tensor, Tiles]) -> None:
        embed_BH, feature_BH, router, starts = inputs
        wide = Router(*((t if isinstance(t, Tensor) else dequantize_reference(t)).double() for t in router))
        exact_BM = router_scores_reference(embed_BH.double(), feature_BH.double(), wide, _EPS)
        assert_close(out[0], exact_BM, ROUNDED[DTYPE])
        expected = union_tiles_reference(out[0], k, starts, _TILE, num_tiles, groups)
        assert torch.equal(out[1].ranges_t2, expected.ranges_t2), "the ranges are not those of the union"
        if expected.is_of_tG is not None:
            assert torch.equal(out[1].is_of_tG, expected.is_of_tG), "the ranges are of other groups"

    return Case(
        op="router_topk",
        shape=shape.name,
        batch=batch,
        variant=f"R={R} M={M} k={k}, {weight_format}" + (", each row its own" if groups > 1 else ""),
        bytes=weights + 2 * (R + M) + batch * (4 * H + 4 * M) + (8 + (groups if groups > 1 else 0)) * num_tiles,
        flops=2 * batch * R * (2 * H + M),
        make=make,
        kernel=kernel,
        check=check,
        rivals={"torch": composition} if weight_format == "bf16" else {},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
