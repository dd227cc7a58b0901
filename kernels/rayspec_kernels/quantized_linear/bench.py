"""quantized_linear: W in fewer bits once, x [B, H], and all of the B N results, 2 B N H flops.

A router of rank 512 of Llama-3.1-8B scores 128256 tokens: 131 MB in bf16, 30 us at an H200's 4.3 TB/s; 66 MB in int8
and fp8, 15 us; 37 MB in int4 with groups of 64, 9 us. The results are 0.26 MB a row of x: at B = 64 they are 16 MB, a
third of what int4 moves at all.

The projection in front of that router or of a low-rank head (512 x 4096) is 4.2 MB in bf16, 1 us, 1.2 MB in int4. On
tensor cores it is 32 tiles of 16 rows, each of which streams 131 KB. For up to 4 rows of x there are 256 programs
without tensor cores instead, each with all of its 16 KB in flight. Splitting the width over four programs (split-K)
fills the device for any number of rows, but a second launch must add the parts. The suite times all three.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): the large matrix at B = 1 takes 26 us in int8, 34 in fp8
and 57 in int4, against 35 for torch's product in bf16; at B = 64 it takes 55, 61 and 175 against 42. The small one at
B = 1 takes 3.4 in bf16 without tensor cores, 9.9 with them, 6.3 split, against torch's 7.1 (int4: 3.4, 58, 17), and at
B = 64, on tensor cores, 10.2 against 7.6 (int4: 53). Split it was timed at B = 1 alone, and nothing chooses it. Not
built: adding the parts up without a launch, by whoever reads them (at 16 rows as many bytes of L2 as the head's own
matrix has) or by the last program to arrive (counters that outlive the call, which a fault or a second stream leaves
wrong).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.closeness import ROUNDED, assert_close
from rayspec_kernels.common.inputs import DTYPE, float64_scores, formats, random, random_weight, stored_bytes
from rayspec_kernels.common.quantized import FORMATS
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.quantized_linear.kernel import gemv_kernel, linear_kernel, tiled_kernel
from rayspec_kernels.quantized_linear.reference import linear_reference


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for weight_format in FORMATS:
        if weight_format in formats(shape.rank):
            yield _case(shape, batch, shape.vocab, shape.rank, weight_format)
    for weight_format in ("bf16", "int4"):
        if weight_format in formats(shape.hidden):
            yield _case(shape, batch, shape.rank, shape.hidden, weight_format)


def _case(shape: Shape, batch: int, outputs: int, width: int, weight_format: str) -> Case:
    is_small = outputs == shape.rank

    def make(generator: torch.Generator) -> Inputs:
        weight = random_weight(generator, outputs, width, weight_format)
        return random(generator, batch, width), weight, random(generator, outputs, width)

    def check(inputs: Inputs, out_BN: Tensor) -> None:
        assert_close(out_BN, float64_scores(*inputs[:2]), ROUNDED[DTYPE])

    return Case(
        op="quantized_linear",
        shape=shape.name,
        batch=batch,
        variant=f"{'r x H' if is_small else 'V x r'} {weight_format}",
        bytes=stored_bytes(outputs, width, weight_format) + 2 * batch * (width + outputs),
        flops=2 * batch * outputs * width,
        make=make,
        kernel=lambda x, weight, _: linear_kernel(x, weight),
        check=check,
        rivals={"product in bf16": lambda x, _, plain: linear(x, plain)}
        | (
            {"dequantise, product": lambda x, weight, _: linear_reference(x, weight)} if weight_format != "bf16" else {}
        ),
        alternatives={
            "on tensor cores": lambda x, weight, _: tiled_kernel(x, weight),
            "without them": lambda x, weight, _: gemv_kernel(x, weight),
            "split in 4": lambda x, weight, _: tiled_kernel(x, weight, parts=4),
        }
        if is_small and batch <= 16
        else {},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
