"""grouped_rmsnorm: forward one read and one write of x [N, 4 H]; backward two reads and one write. A few flops a byte.

4096 rows (a training step's tokens) of 4 x 4096 columns in bf16: 268 MB forward, 62 us at an H200's 4.3 TB/s, and
403 MB backward. At decoding sizes a launch costs more than the data.

Measured (H200, 2026-11-26, docs/results/h200; Llama-3.1-8B): at 4096 rows forward 70 us (3.8 TB/s) against 237 for
torch's rms_norm and a product, backward 150 (2.7 TB/s) against 1826 for the plain operations below; at 64 rows 3.4
against 9.9, and 9.9 against 51.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from rayspec_kernels.common.bench import Case, Inputs, run
from rayspec_kernels.common.closeness import ROUNDED, assert_close
from rayspec_kernels.common.inputs import DTYPE, random
from rayspec_kernels.common.shapes import BATCHES, MODELS, Shape
from rayspec_kernels.grouped_rmsnorm.kernel import grouped_rmsnorm_backward_kernel, grouped_rmsnorm_kernel
from rayspec_kernels.grouped_rmsnorm.reference import grouped_rmsnorm_reference

_GROUPS = 4  # SpecFormer's four taps
_EPS = 1e-5


def cases(shape: Shape, batch: int) -> Iterator[Case]:
    """Rows are 64 times the batch: a prompt or a training step, since decoding sizes are all launch."""
    N, C = 64 * batch if shape.vocab > 1000 else batch, _GROUPS * shape.hidden

    def make(generator: torch.Generator) -> Inputs:
        return random(generator, N, C), random(generator, C)

    def forward(x_NC: Tensor, weight_C: Tensor) -> Tensor:
        return grouped_rmsnorm_kernel(x_NC, weight_C, _GROUPS, _EPS)[0]

    def composition(x_NC: Tensor, weight_C: Tensor) -> Tensor:
        return rms_norm(x_NC.view(N, _GROUPS, -1), (C // _GROUPS,), eps=_EPS).view(N, C) * weight_C

    def check(inputs: Inputs, y_NC: Tensor) -> None:
        exact = grouped_rmsnorm_reference(inputs[0].double(), inputs[1].double(), _GROUPS, _EPS)
        assert_close(y_NC, exact, ROUNDED[DTYPE])

    common = {"op": "grouped_rmsnorm", "shape": shape.name, "batch": batch}
    yield Case(
        **common,  # type: ignore[arg-type]
        variant=f"forward, {N} rows",
        bytes=2 * 2 * N * C,
        flops=4 * N * C,
        make=make,
        kernel=forward,
        check=check,
        rivals={"torch": composition},
    )

    def make_backward(generator: torch.Generator) -> Inputs:
        x_NC, weight_C = make(generator)
        inverse_NG = (x_NC.float().view(N, _GROUPS, -1).square().mean(dim=2) + _EPS).rsqrt()
        return random(generator, N, C), x_NC, weight_C, inverse_NG

    def check_backward(inputs: Inputs, out: tuple[Tensor, Tensor]) -> None:
        dy_NC, x_NC, weight_C, _ = inputs
        wide_x, wide_weight = x_NC.double().requires_grad_(), weight_C.double().requires_grad_()
        grouped_rmsnorm_reference(wide_x, wide_weight, _GROUPS, _EPS).backward(dy_NC.double())
        assert wide_x.grad is not None
        assert wide_weight.grad is not None
        assert_close(out[0], wide_x.grad, ROUNDED[DTYPE])
        assert_close(out[1][None], wide_weight.grad[None], ROUNDED[DTYPE])

    def composition_backward(
        dy_NC: Tensor, x_NC: Tensor, weight_C: Tensor, inverse_NG: Tensor
    ) -> tuple[Tensor, Tensor]:
        inverse_NG1 = inverse_NG[:, :, None]
        unit_NGD = x_NC.view(N, _GROUPS, -1) * inverse_NG1
        scaled_NGD = (dy_NC * weight_C).view(N, _GROUPS, -1)
        dx_NGD = inverse_NG1 * (scaled_NGD - unit_NGD * (scaled_NGD * unit_NGD).mean(dim=2, keepdim=True))
        return dx_NGD.view(N, C).to(x_NC.dtype), (dy_NC * unit_NGD.view(N, C)).sum(dim=0).to(weight_C.dtype)

    yield Case(
        **common,  # type: ignore[arg-type]
        variant=f"backward, {N} rows",
        bytes=2 * 3 * N * C,
        flops=8 * N * C,
        make=make_backward,
        kernel=grouped_rmsnorm_backward_kernel,
        check=check_backward,
        rivals={"torch": composition_backward},
    )


if __name__ == "__main__":
    run(case for shape in MODELS for batch in BATCHES for case in cases(shape, batch))
