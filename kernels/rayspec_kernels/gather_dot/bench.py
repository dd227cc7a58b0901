"""gather_dot: n rows of W for each of T rows of x, T n H weights, 2 T n H flops, T n results and 8-byte ids.

SpecVocab's n = 2048 of Llama-3.1-8B's rows: 16.8 MB a row of x, 4 us at an H200's 4.3 TB/s, and 64 times that at
T = 64, where the rows together are as large as the whole head. int8 and fp8 move half, 2 us a row of x; int4 with
groups of 64 moves 0.28 of it, 1.1 us. Rows that several requests choose may come from the L2 cache; the floor counts
them every time. One flop a byte (3.6 with int4): tensor cores have nothing to do, but making numbers of bytes takes
instructions that the floor does not know of.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): in bf16 7.3 us at B = 1 (2.3 TB/s), 2.4 times faster than
gathering and a batched product in torch (17.6), and 233 at B = 64, 5.6 times (1310; 4.6 TB/s, rows counted as often as
they are chosen). Fewer bits: 6.5 and 167 in int8, 5.5 and 138 in fp8, 6.2 and 153 in int4.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.closeness import ROUNDED, assert_close
from rayspec_kernels.common.inputs import DTYPE, formats, random, random_ids, random_weight, stored_bytes
from rayspec_kernels.common.quantized import Quantized, dequantize_reference
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.gather_dot.kernel import gather_dot_kernel
from rayspec_kernels.gather_dot.reference import gather_dot_reference


@lru_cache(maxsize=1)
def _weight(V: int, H: int, weight_format: str, device: torch.device) -> Tensor | Quantized:
    """One for all inputs that rotate: other ids are other, cold rows of it."""
    return random_weight(torch.Generator(device).manual_seed(0), V, H, weight_format)


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for weight_format in formats(shape.hidden):
        yield _case(shape, batch, weight_format)


def _case(shape: Shape, batch: int, weight_format: str) -> Case:
    V, H = shape.vocab, shape.hidden
    n = min(2048, V)

    def make(generator: torch.Generator) -> Inputs:
        ids_Tn = random_ids(generator, V, batch, n).sort(dim=1).values
        return random(generator, batch, H), _weight(V, H, weight_format, generator.device), ids_Tn

    def check(inputs: Inputs, out_Tn: Tensor) -> None:
        x_TH, weight, ids_Tn = inputs
        exact = [_wide_rows(weight, ids_n) @ x_H.double() for x_H, ids_n in zip(x_TH, ids_Tn, strict=True)]
        assert_close(out_Tn, torch.stack(exact), ROUNDED[DTYPE])

    return Case(
        op="gather_dot",
        shape=shape.name,
        batch=batch,
        variant=f"n={n}, {weight_format}",
        bytes=batch * (stored_bytes(n, H, weight_format) + n * (8 + 2) + 2 * H),
        flops=2 * batch * n * H,
        make=make,
        kernel=gather_dot_kernel,
        check=check,
        rivals={"gather, batched product": gather_dot_reference} if weight_format == "bf16" else {},
    )


def _wide_rows(weight: Tensor | Quantized, ids_n: Tensor) -> Tensor:
    return (weight[ids_n] if isinstance(weight, Tensor) else dequantize_reference(weight.rows(ids_n))).double()


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
