"""slim_posterior: reads 12 bytes a candidate and 12 for each of its pairs, writes N^2 + 32 N bytes a request, and adds
two numbers for each of D k K hypotheses: 9 KB and 1,300 flops a request with D = 4, k = 8, K = 20 and N = 64.

That floor is nanoseconds; what counts is latency. In torch it is some hundred and fifty launches, here two. Within them
steps depend on each other: about log2(P) loads to find a pair's key, all pairs at once, then K steps a position to
merge the lists and K more to choose among them, each a reduction in one warp and a load from the first-level cache.

Candidates are drawn from the whole vocabulary; next to no pair of a large one was counted, but the work is the same.

Tried: compiled with 1, 2 and 4 warps; none spills, and with one the loops that merge and choose hold no barrier. Not
tried: a program for every list and a launch for every position, which would merge side by side.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): with K = 20 27 us at B = 1 (warm) against torch's 270, and
33 at B = 64 against 423; with K = 40 48 against 307, and 55 against 473.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.inputs import random, random_ids
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.kernel import slim_posterior_kernel
from rayspec_kernels.slim_posterior.reference import Sizes, SlimPosterior, slim_posterior_reference

_PAIRS = 2**20
_USUAL = (Sizes(4, 8, 20, 64), Sizes(4, 8, 40, 64))
_SMALL = (Sizes(3, 5, 9, 17),)  # for the vocabularies of tests: the interpreter takes seconds for the usual ones


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for sizes in _USUAL if shape.vocab > 1000 else _SMALL:
        yield _case(shape, batch, sizes)


def _case(shape: Shape, batch: int, sizes: Sizes) -> Case:
    V, (D, k, K, N) = shape.vocab, sizes
    P = min(_PAIRS, V * V // 2)

    def make(generator: torch.Generator) -> Inputs:
        spread = V * V // P
        key_P = torch.arange(P, device=generator.device) * spread + random_ids(generator, spread, P)
        values = [random(generator, n).float() for n in (P, V, V)]
        log_p_BDk = random(generator, batch, D, k).float().log_softmax(dim=2)
        ids_BDk = random_ids(generator, V, batch, D, k)
        return random_ids(generator, V, batch), ids_BDk, log_p_BDk, Correlations(key_P, *values)

    def kernel(root_B: Tensor, ids_BDk: Tensor, log_p_BDk: Tensor, correlations: Correlations) -> SlimPosterior:
        return slim_posterior_kernel(root_B, ids_BDk, log_p_BDk, correlations, 0.0, K, N)

    def composition(root_B: Tensor, ids_BDk: Tensor, log_p_BDk: Tensor, correlations: Correlations) -> SlimPosterior:
        return slim_posterior_reference(root_B, ids_BDk, log_p_BDk, correlations, 0.0, K, N)

    def check(inputs: Inputs, out: SlimPosterior) -> None:
        expected = composition(*inputs)
        for ours, theirs in zip((*out[::2], *out.links), (*expected[::2], *expected.links), strict=True):
            assert torch.equal(ours, theirs), "the tree is not the reference's"

    pairs = k + (D - 1) * k * k
    return Case(
        op="slim_posterior",
        shape=shape.name,
        batch=batch,
        variant=f"D={D} k={k} K={K} N={N}",
        bytes=batch * (8 + 12 * (D * k + pairs) + N * N + 32 * N + 8),
        flops=2 * batch * D * k * K,
        make=make,
        kernel=kernel,
        check=check,
        rivals={"torch": composition},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
