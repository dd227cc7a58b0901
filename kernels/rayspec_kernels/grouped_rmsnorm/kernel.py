"""RMSNorm of each group of columns alone: one read and one write of x, forward and backward.

N = rows, G = groups, D = columns of a group, C = G * D, P = programs that share the rows in the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rayspec_kernels.common.rows_dot import multiprocessors


@triton.jit
def _forward_kernel(x_ptr, weight_ptr, y_ptr, inverse_ptr, G, D, stride_x, eps,
                    SUM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d_D = tl.arange(0, BLOCK_D)
    x_D = tl.load(x_ptr + row * stride_x + group * D + d_D, mask=d_D < D, other=0.0).to(SUM)
    inverse = 1.0 / tl.sqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
    weight_D = tl.load(weight_ptr + group * D + d_D, mask=d_D < D, other=0.0).to(SUM)
    y_D = x_D * inverse * weight_D
    tl.store(y_ptr + (row * G + group) * D + d_D, y_D.to(y_ptr.dtype.element_ty), mask=d_D < D)
    tl.store(inverse_ptr + row * G + group, inverse)


@triton.jit
def _backward_kernel(x_ptr, weight_ptr, inverse_ptr, dy_ptr, dx_ptr, dweight_ptr, N, G, D, stride_x, stride_dy,
                     SUM: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """dx = r (w dy - x r^2 mean(w dy x)), dw = sum over rows of dy x r; r is the inverse root mean square."""
    program, group = tl.program_id(0), tl.program_id(1)
    d_D = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight_ptr + group * D + d_D, mask=d_D < D, other=0.0).to(SUM)
    dweight_D = tl.zeros((BLOCK_D,), SUM)
    for n in range(program, N, tl.num_programs(0)):
        row = tl.cast(n, tl.int64)
        inverse = tl.load(inverse_ptr + row * G + group)
        x_D = tl.load(x_ptr + row * stride_x + group * D + d_D, mask=d_D < D, other=0.0).to(SUM)
        dy_D = tl.load(dy_ptr + row * stride_dy + group * D + d_D, mask=d_D < D, other=0.0).to(SUM)
        scaled_D = weight_D * dy_D
        mean = tl.sum(scaled_D * x_D, axis=0) / D
        dx_D = inverse * (scaled_D - x_D * (inverse * inverse * mean))
        tl.store(dx_ptr + (row * G + group) * D + d_D, dx_D.to(dx_ptr.dtype.element_ty), mask=d_D < D)
        dweight_D += dy_D * x_D * inverse
    tl.store(dweight_ptr + (tl.cast(program, tl.int64) * G + group) * D + d_D, dweight_D, mask=d_D < D)


def _sums(x_NC: Tensor) -> torch.dtype:
    return torch.float64 if x_NC.dtype == torch.float64 else torch.float32


def _check(x_NC: Tensor, weight_C: Tensor, groups: int) -> None:
    if x_NC.dim() != 2 or x_NC.shape[0] < 1 or x_NC.stride(1) != 1 or not weight_C.is_contiguous():
        raise ValueError(
            f"x must have two dimensions, rows and contiguous columns and weight must be contiguous, got "
            f"{tuple(x_NC.shape)} with strides {x_NC.stride()}; call .contiguous() on it"
        )
    if groups < 1 or x_NC.shape[1] % groups or weight_C.shape != x_NC.shape[1:]:
        raise ValueError(
            f"groups must divide the {x_NC.shape[1]} columns, of which each has a weight, got {groups} groups and "
            f"weight {tuple(weight_C.shape)}"
        )


def _launch(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK_D": block, "num_warps": min(16, max(1, block // 512))}  # 16 elements a thread: two wide loads


def grouped_rmsnorm_kernel(x_NC: Tensor, weight_C: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """(y [N, C] in the dtype of x, inverse root mean squares [N, G] in float32, or float64 of float64)."""
    _check(x_NC, weight_C, groups)
    (N, C), sums = x_NC.shape, _sums(x_NC)
    y_NC = torch.empty(N, C, dtype=x_NC.dtype, device=x_NC.device)
    inverse_NG = torch.empty(N, groups, dtype=sums, device=x_NC.device)
    _forward_kernel[(N, groups)](
        x_NC, weight_C, y_NC, inverse_NG, groups, C // groups, x_NC.stride(0), eps,
        SUM=tl.float64 if sums == torch.float64 else tl.float32, **_launch(C // groups),
    )  # fmt: skip
    return y_NC, inverse_NG


def grouped_rmsnorm_backward_kernel(
    dy_NC: Tensor, x_NC: Tensor, weight_C: Tensor, inverse_NG: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx [N, C], dweight [C]) in the dtypes of x and weight. Deterministic: each program keeps its own sums."""
    groups = inverse_NG.shape[1]
    _check(x_NC, weight_C, groups)
    _check(dy_NC, weight_C, groups)
    (N, C), sums = x_NC.shape, _sums(x_NC)
    programs = min(N, 4 * multiprocessors(x_NC.device))
    dx_NC = torch.empty(N, C, dtype=x_NC.dtype, device=x_NC.device)
    dweight_PC = torch.empty(programs, C, dtype=sums, device=x_NC.device)
    _backward_kernel[(programs, groups)](
        x_NC, weight_C, inverse_NG, dy_NC, dx_NC, dweight_PC, N, groups, C // groups, x_NC.stride(0), dy_NC.stride(0),
        SUM=tl.float64 if sums == torch.float64 else tl.float32, **_launch(C // groups),
    )  # fmt: skip
    return dx_NC, dweight_PC.sum(dim=0).to(weight_C.dtype)
