"""quantized_linear: W in fewer bits once, x [B, H], and all of the B N results, 2 B N H flops.

A router of rank 512 of Llama-3.1-8B scores 128256 tokens: 131 MB in bf16, 30 us at an H200's 4.3 TB/s; 66 MB in int8
and fp8, 15 us; 37 MB in int4 with groups of 64, 9 us. The results are 0.26 MB a row of x: at B = 64 they are 16 MB, a
third of what int4 moves at all. The projection in front of the router (512 x 4096) is of 1 to 2 MB, less than a
microsecond, so that its launch is what it costs.

Measured: nothing yet; no GPU has run this. Not built, since nothing could be measured: splitting H over programs. The
small projection in front of a head has 32 tiles for 132 multiprocessors, so that by this arithmetic it could win a
microsecond or two of the head's 31 (bf16), less a second pass over the parts.
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
from rayspec_kernels.quantized_linear.kernel import linear_kernel
from rayspec_kernels.quantized_linear.reference import linear_reference


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    for weight_format in FORMATS:
        if weight_format in formats(shape.rank):
            yield _case(shape, batch, weight_format)


def _case(shape: Shape, batch: int, weight_format: str) -> Case:
    outputs, width = shape.vocab, shape.rank

    def make(generator: torch.Generator) -> Inputs:
        weight = random_weight(generator, outputs, width, weight_format)
        return random(generator, batch, width), weight, random(generator, outputs, width)

    def check(inputs: Inputs, out_BN: Tensor) -> None:
        assert_close(out_BN, float64_scores(*inputs[:2]), ROUNDED[DTYPE])

    return Case(
        op="quantized_linear",
        shape=shape.name,
        batch=batch,
        variant=f"r={width}, {weight_format}",
        bytes=stored_bytes(outputs, width, weight_format) + 2 * batch * (width + outputs),
        flops=2 * batch * outputs * width,
        make=make,
        kernel=lambda x, weight, _: linear_kernel(x, weight),
        check=check,
        rivals={
            "product in bf16": lambda x, _, plain: linear(x, plain),
            "dequantise, product": lambda x, weight, _: linear_reference(x, weight),
        },
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
