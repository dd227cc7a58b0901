"""indexed_head: |I| x H weights and |I| indices of 4 bytes, 2 B |I| H flops.

DynaSpec's 28 K of Llama-3.1-8B's rows: 235 MB, so 55 us at an H200's 4.3 TB/s, half of that in int8 and fp8, 15 us in
int4; a row is 8 KiB in one piece, so the floor is the same wherever the rows lie. Gathering first moves every byte
three times (read, write, read).

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): a list in bf16 69 us at B = 1 (3.4 TB/s) and 88 at B = 64,
against 120 and 156 for a trimmed head's product, top-k and log-sum-exp in torch, and 253 and 283 with the rows gathered
first. Over all shapes and layouts it is 1.2 to 1.9 times the trimmed head's product alone (57 and 63 us). At B = 64
ranges take 90, stored in the list's order or not, and stored so 110 in int8, 133 in fp8, 355 in int4. At B = 1 ranges
were only timed with programs that go over tiles in turn, which are gone: 78, stored in order 82, 53 in int8, 70 in fp8,
136 in int4. Not tried yet: bulk tensor copies of whole ranges.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_best
from rayspec_kernels.common.inputs import (
    best_bytes,
    float64_scores,
    formats,
    random,
    random_ids,
    random_weight,
    stored_bytes,
)
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.head_topk.bench import K, topk_and_norm
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.indexed_head.reference import Tiles

_CLUSTER = 256  # tokens; DynaSpec's clusters are about this large with 512 of them
_TILE = 64  # as clustered heads have it
_GROUPS = "ranges, half of them for each row"


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    rows = min(28 * 1024, shape.vocab // 2)
    clusters = -(-rows // _CLUSTER)
    for where in ("list", "ranges", "ranges stored in order"):
        yield _case(shape, batch, where, "bf16", clusters, min(_CLUSTER, rows))
    if batch > 1:
        yield _case(shape, batch, _GROUPS, "bf16", clusters, min(_CLUSTER, rows))
    for weight_format in formats(shape.hidden)[1:]:
        yield _case(shape, batch, "ranges stored in order", weight_format, clusters, min(_CLUSTER, rows))


def _case(shape: Shape, batch: int, where: str, weight_format: str, clusters: int, cluster: int) -> Case:
    V, H, k = shape.vocab, shape.hidden, min(K, clusters * cluster)
    rows = clusters * cluster
    is_listed_order = where.endswith("in order")

    def make(generator: torch.Generator) -> Inputs:
        """Clusters spread over the matrix; the ranges in as many tiles again that are empty, as a padded union has."""
        weight = random_weight(generator, V, H, weight_format)
        device = generator.device
        chosen = torch.randperm(V // cluster, generator=generator, device=device)[:clusters].sort().values * cluster
        place_T = torch.arange(0, cluster, _TILE, device=device)
        first = (chosen[:, None] + place_T).flatten()
        count = (cluster - place_T).clamp(max=_TILE).expand(clusters, -1).flatten()
        ranges_t2 = torch.stack([first, count], dim=1).int()
        ranges_t2 = torch.cat([ranges_t2, torch.zeros_like(ranges_t2)])
        ids_n = (chosen[:, None] + torch.arange(cluster, device=device)).flatten().int()
        every = torch.arange(V, device=device, dtype=torch.int32)
        is_of_tG = is_struck_BV = None
        if where == _GROUPS:
            is_of_tG = random_ids(generator, 2, len(ranges_t2), batch).to(torch.int8)
            is_of_tG[0] = 1  # as what is pinned
            is_struck_BV = torch.ones(batch, V, dtype=torch.bool, device=device)
            is_struck_BV[:, ids_n.long()] = is_of_tG.repeat_interleave(ranges_t2[:, 1], dim=0).T == 0
        trimmed = weight[ids_n] if isinstance(weight, Tensor) else None
        return random(generator, batch, H), weight, every, ids_n, ranges_t2, is_of_tG, is_struck_BV, trimmed

    def kernel(*inputs: Any) -> Best:
        x_BH, weight, every, ids_n, ranges_t2, is_of_tG, *_ = inputs
        if where == "list":
            return indexed_head_kernel(x_BH, weight, ids_n, k)
        return indexed_head_kernel(x_BH, weight, every, k, Tiles(ranges_t2, _TILE, is_of_tG), is_listed_order)

    def check(inputs: Inputs, out: Best) -> None:
        x_BH, weight, _, ids_n, ranges_t2, is_of_tG, *_ = inputs
        scores_BV = float64_scores(x_BH, weight)
        scores_Bn = scores_BV[:, ids_n]
        if is_of_tG is not None:
            is_of_nB = is_of_tG.repeat_interleave(ranges_t2[:, 1], dim=0)
            scores_Bn = scores_Bn.masked_fill(is_of_nB.T == 0, float("-inf"))
        chosen = best_reference(scores_Bn, k)
        assert_best(out, chosen._replace(ids_Bk=ids_n.long()[chosen.ids_Bk]), scores_BV, FLOAT32_SUMS)

    rivals = {
        "product with trimmed head": lambda *inputs: linear(inputs[0], inputs[-1]),
        "trimmed, top-k, log-sum-exp": lambda *inputs: topk_and_norm(linear(inputs[0], inputs[-1]), k),
        "gather, product": lambda *inputs: linear(inputs[0], inputs[1].index_select(0, inputs[3])),
        "gather, product, top-k, log-sum-exp": lambda *inputs: topk_and_norm(
            linear(inputs[0], inputs[1].index_select(0, inputs[3])), k
        ),
    }
    if where == _GROUPS:  # rows that choose for themselves share no trimmed head
        rivals = {
            "everything, struck out, top-k, log-sum-exp": lambda *inputs: topk_and_norm(
                linear(inputs[0], inputs[1]).masked_fill(inputs[-2], float("-inf")), k
            )
        }
    return Case(
        op="indexed_head",
        shape=shape.name,
        batch=batch,
        variant=f"{rows} rows, {where} {weight_format}",
        bytes=stored_bytes(rows, H, weight_format) + 4 * rows + 2 * batch * H + best_bytes(batch, k),
        flops=2 * batch * rows * H,
        make=make,
        kernel=kernel,
        check=check,
        rivals=rivals if weight_format == "bf16" else {},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
