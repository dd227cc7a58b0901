"""tree_prune: reads 12 bytes a candidate, 8 for each of its beam entries and 12 for its pair, writes N^2 + 32 N bytes a
request, and adds D numbers a candidate: 14 KB and 1,200 flops a request with D = 4, W = 10 (310 candidates) and N = 64.

That floor is nanoseconds; what counts is latency. In torch it is 92 operations, here one. Within it follow each
other about log2(P) loads to find the keys of all pairs, D sums along the paths, K reductions over the candidates in
four warps (two barriers each), and D walks from the chosen candidates to the root.

Tried: nothing beyond this; compiled for sm_90 it does not spill. Not tried: a bitonic sort instead of K reductions.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): 33 us at B = 1 (warm) against torch's 204, and 42 at
B = 64 against 337.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.inputs import random, random_ids
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.slim_posterior.correlations import Correlations
from rayspec_kernels.slim_posterior.reference import SlimPosterior
from rayspec_kernels.tree_prune.kernel import tree_prune_kernel
from rayspec_kernels.tree_prune.reference import Expansion, tree_prune_reference

_PAIRS = 2**20


def random_expansion(generator: torch.Generator, B: int, depth: int, topk: int, vocab: int) -> tuple[Tensor, Expansion]:
    """(root, expansion) as a draft loop leaves them; every step goes on from `topk` candidates of the last."""
    device, C = generator.device, topk + (depth - 1) * topk**2
    parents, above_BW = [torch.full((B, 1), -1, device=device)], torch.ones(B, 1, device=device)
    p: list[Tensor] = []
    first = 0
    for step in range(depth):
        probs = torch.rand(B, above_BW.shape[1], topk, generator=generator, device=device).softmax(dim=2)
        p.append((above_BW[:, :, None] * probs).flatten(1))
        if step < depth - 1:
            best_BW = p[-1].topk(topk, dim=1).indices.sort(dim=1).values
            parents.append(best_BW + first)
            above_BW, first = p[-1].gather(1, best_BW), first + p[-1].shape[1]
    parents_BP = torch.cat(parents, dim=1) if depth > 1 else parents[0][:, :0]
    tokens_BC = random_ids(generator, vocab, B, C)
    return random_ids(generator, vocab, B), Expansion(parents_BP, torch.cat(p, dim=1), tokens_BC)


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    """One case, a small one for the small vocabularies of tests: the interpreter takes seconds for the usual one."""
    is_real = shape.vocab > 1000
    yield _case(shape, batch, *((4, 10, 40, 64) if is_real else (3, 3, 9, 14)))


def _case(shape: Shape, batch: int, depth: int, topk: int, count: int, num_nodes: int) -> Case:
    V, C = shape.vocab, topk + (depth - 1) * topk**2
    P = min(_PAIRS, V * V // 2)

    def make(generator: torch.Generator) -> Inputs:
        spread = V * V // P
        key_P = torch.arange(P, device=generator.device) * spread + random_ids(generator, spread, P)
        correlations = Correlations(key_P, *(random(generator, n).float() for n in (P, V, V)))
        return *random_expansion(generator, batch, depth, topk, V), correlations

    sizes: dict[str, Any] = {"length_bonus": 0.0, "topk": topk, "depth": depth, "count": count, "num_nodes": num_nodes}
    composition = partial(tree_prune_reference, **sizes)

    def check(inputs: Inputs, out: SlimPosterior) -> None:
        expected = composition(*inputs)
        for ours, theirs in zip((*out[::2], *out.links), (*expected[::2], *expected.links), strict=True):
            assert torch.equal(ours, theirs), "the tree is not the reference's"

    entries = 1 + (depth - 1) * topk
    return Case(
        op="tree_prune",
        shape=shape.name,
        batch=batch,
        variant=f"D={depth} W={topk} K={count} N={num_nodes}",
        bytes=batch * (8 + 24 * C + 8 * entries + num_nodes**2 + 32 * num_nodes + 8),
        flops=batch * C * depth,
        make=make,
        kernel=partial(tree_prune_kernel, **sizes),
        check=check,
        rivals={"torch": composition},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
