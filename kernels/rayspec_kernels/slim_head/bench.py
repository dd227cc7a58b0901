"""slim_head: r H + V r weights, 2 B r (H + V) flops; at r = H / 8 an eighth of the full head and a little.

Llama-3.1-8B, r = 512: down 4.2 MB and up 131 MB, so 31 us at an H200's 4.3 TB/s (the full head: 244 us); half of that
in int8 and fp8, 9 us in int4 with groups of 64. The down projection is 3% of the bytes but a launch of its own, and the
merge another: some microseconds that only a single persistent launch could save.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): in bf16 58 us at B = 1 (2.3 TB/s; "a tile a program"
there) against 130 for products, top-k and log-sum-exp in torch, and 106 at B = 64 against 279; the products alone take
42 and 50. That is 4.3 and 2.9 times faster than head_topk. Fewer bits at B = 64: 114, 124 and 280 in int8, fp8 and
int4. At B = 1 these were only timed with programs that go over tiles in turn, which are gone: 55, 59 and 89, where bf16
took 66. With the down projection on tensor cores bf16 took 72 so (see quantized_linear). Not tried: both projections in
one persistent launch, whose programs would have to wait for each other.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.functional import linear

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.best import Best
from rayspec_kernels.common.closeness import ROUNDED
from rayspec_kernels.common.inputs import (
    DTYPE,
    best_bytes,
    check_best,
    float64_scores,
    formats,
    random,
    random_weight,
    stored_bytes,
)
from rayspec_kernels.common.logits_topk import logits_topk, product
from rayspec_kernels.common.score_tiles import score_tiles
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.head_topk.bench import K, topk_and_norm
from rayspec_kernels.quantized_linear.kernel import linear_kernel, tiled_kernel
from rayspec_kernels.slim_head.kernel import slim_head_kernel


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for weight_format in formats(shape.hidden, shape.rank):
        yield _case(shape, batch, weight_format)


def _case(shape: Shape, batch: int, weight_format: str) -> Case:
    V, H, r, k = shape.vocab, shape.hidden, shape.rank, min(K, shape.vocab)
    is_plain = weight_format == "bf16"

    def make(generator: torch.Generator) -> Inputs:
        down, up = (random_weight(generator, *size, weight_format) for size in ((r, H), (V, r)))
        return random(generator, batch, H), down, up

    def check(inputs: Inputs, out: Best) -> None:
        x_BH, down, up = inputs
        check_best(out, float64_scores(float64_scores(x_BH, down), up), ROUNDED[DTYPE])

    rivals = {
        "products alone": lambda x, down, up: linear(linear(x, down), up),
        "products, top-k": lambda x, down, up: linear(linear(x, down), up).topk(k),
        "products, top-k, log-sum-exp": lambda x, down, up: topk_and_norm(linear(linear(x, down), up), k),
    }
    alternatives = {
        "up by cuBLAS": lambda x, down, up: logits_topk(product(linear_kernel(x, down), up), k),
        "products by cuBLAS": lambda x, down, up: logits_topk(product(linear(x, down), up), k),
    }
    if batch <= 16:
        alternatives["down on tensor cores"] = lambda x, down, up: score_tiles(tiled_kernel(x, down), up, k)
    return Case(
        op="slim_head",
        shape=shape.name,
        batch=batch,
        variant=f"r={r}, {weight_format}",
        bytes=sum(stored_bytes(*size, weight_format) for size in ((r, H), (V, r)))
        + 2 * batch * H
        + best_bytes(batch, k),
        flops=2 * batch * r * (H + V),
        make=make,
        kernel=partial(slim_head_kernel, k=k),
        check=check,
        rivals=rivals if is_plain else {},
        alternatives=alternatives if is_plain else {},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
