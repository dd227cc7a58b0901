"""head_topk: V x H weights once, 2 B V H flops; x [B, H] and the k best beside them are nothing.

Llama-3.1-8B (V = 128256, H = 4096): 1.05 GB in bf16, so 0.24 ms at the 4.3 TB/s that an H200 copies with; at B = 64 the
67 GFLOP take 0.09 ms at its 790 TFLOP/s, so that memory is the floor up to some B = 180. int8 and fp8 move half, int4
with groups of 64 moves 0.28 of it. What the composition pays on top: writing and reading [B, V] logits in bf16 and
float32 and sorting them, whole launches of its own.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): in bf16 251 us at B = 1 (4.2 TB/s) against 339 for
product, top-k and log-sum-exp in torch, and 308 at B = 64 against 515; the product alone takes 249 and 284. At B = 1
int8 takes 161, fp8 226, and int4 451, 1.8 times as long as bf16; at B = 64 all three are slower than bf16 (384, 434 and
1353). Those at B = 1 are the times of "a tile a program" there.

Compiled for sm_90 bf16 is wgmma with the weight tile as left operand in shared memory, fewer bits are mma.sync with the
weights as right operand in registers, weights and the scales of int4 come by asynchronous copies, and nothing spills.
Tried, and it did not help: programs that go over several tiles in turn (254, 162, 227 and 483 us at B = 1), whose lists
spill registers at B = 64; weights of fewer bits as left operand of wgmma, which assemblers before CUDA 13.3 miscompile
(common/rows_dot.py). Not tried yet: bulk tensor copies.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.best import Best
from rayspec_kernels.common.closeness import FLOAT32_SUMS
from rayspec_kernels.common.inputs import (
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
from rayspec_kernels.head_topk.kernel import head_topk_kernel

K = 8
TILES = (32, 64)  # that are timed beside what the kernel chooses, 128 rows of a large vocabulary


def topk_and_norm(logits_BV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return *logits_BV.topk(k), logits_BV.float().logsumexp(dim=1)


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for weight_format in formats(shape.hidden):
        yield _case(shape, batch, weight_format, min(K, shape.vocab))


def _case(shape: Shape, batch: int, weight_format: str, k: int) -> Case:
    def make(generator: torch.Generator) -> Inputs:
        x_BH = random(generator, batch, shape.hidden)
        return x_BH, random_weight(generator, shape.vocab, shape.hidden, weight_format)

    def check(inputs: Inputs, out: Best) -> None:
        check_best(out, float64_scores(*inputs), FLOAT32_SUMS)

    rivals = {
        "product alone": linear,
        "product, top-k": lambda x, w: linear(x, w).topk(k),
        "product, top-k, log-sum-exp": lambda x, w: topk_and_norm(linear(x, w), k),
    }
    return Case(
        op="head_topk",
        shape=shape.name,
        batch=batch,
        variant=weight_format,
        bytes=stored_bytes(shape.vocab, shape.hidden, weight_format) + 2 * batch * shape.hidden + best_bytes(batch, k),
        flops=2 * batch * shape.vocab * shape.hidden,
        make=make,
        kernel=partial(head_topk_kernel, k=k),
        check=check,
        rivals=rivals if weight_format == "bf16" else {},
        alternatives=_alternatives(weight_format, batch, k),
    )


def _alternatives(weight_format: str, batch: int, k: int) -> Mapping[str, Callable[..., Best]]:
    tiles = {f"tiles of {n} rows": partial(score_tiles, k=k, tile=n) for n in TILES} if batch == 1 else {}
    if weight_format != "bf16":
        return tiles
    return {**tiles, "product by cuBLAS": lambda x, w: logits_topk(product(x, w), k)}


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
