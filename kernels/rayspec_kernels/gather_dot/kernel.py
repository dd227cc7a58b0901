"""Dot products with chosen rows of a matrix, read where they lie. T = rows, n = choices, H = width, V = rows of W.

Each row of x has its own choices, so nothing is shared and nothing is left for tensor cores: a program multiplies a
few whole rows of W with one row of x and adds up once at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_dot_kernel(x_ptr, weight_ptr, ids_ptr, out_ptr, n, V, H, stride_x, stride_w, stride_ids,
                       EVEN_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    id_N = tl.load(ids_ptr + row * stride_ids + n_N, mask=n_N < n, other=0).to(tl.int64)
    is_id_N = (id_N >= 0) & (id_N < V)
    weight_rows_ptr = weight_ptr + id_N * stride_w
    h_H = tl.arange(0, BLOCK_H)
    products_NH = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for h in tl.range(0, H, BLOCK_H, num_stages=3):  # said here, since the compiler pipelines only dots by itself
        is_x_H, is_w_NH = h + h_H < H, is_id_N[:, None]
        if EVEN_H:
            x_H = tl.load(x_ptr + row * stride_x + h + h_H)
        else:
            is_w_NH = is_w_NH & is_x_H[None, :]
            x_H = tl.load(x_ptr + row * stride_x + h + h_H, mask=is_x_H, other=0.0)
        weight_NH = tl.load(weight_rows_ptr[:, None] + h + h_H[None, :], mask=is_w_NH, other=0.0)
        products_NH += weight_NH.to(tl.float32) * x_H.to(tl.float32)[None, :]
    # an id outside of the matrix cannot raise here as it does in torch; what it gives is no number at least
    out_N = tl.where(is_id_N, tl.sum(products_NH, axis=1), float("nan"))
    tl.store(out_ptr + row * n + n_N, out_N.to(out_ptr.dtype.element_ty), mask=n_N < n)


def gather_dot_kernel(x_TH: Tensor, weight_VH: Tensor, ids_Tn: Tensor) -> Tensor:
    """Like the reference, but that an id out of 0..V-1 gives NaN. Raises ValueError for layouts it does not take."""
    for name, tensor in (("x", x_TH), ("weight", weight_VH), ("ids", ids_Tn)):
        if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.numel()):
            raise ValueError(
                f"{name} must have two dimensions and contiguous columns, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; call .contiguous() on it"
            )
    if weight_VH.dtype != x_TH.dtype or weight_VH.shape[1] != x_TH.shape[1] or len(ids_Tn) != len(x_TH):
        raise ValueError(
            f"weight must have the dtype and width of x and ids its rows, got {x_TH.dtype} {tuple(x_TH.shape)}, "
            f"{weight_VH.dtype} {tuple(weight_VH.shape)} and ids {tuple(ids_Tn.shape)}"
        )
    (T, n), (V, H) = ids_Tn.shape, weight_VH.shape
    out_Tn = torch.empty(T, n, dtype=x_TH.dtype, device=x_TH.device)
    if out_Tn.numel() == 0:
        return out_Tn
    # 8 rows x 512 columns: 32 products a thread, 16 KiB of bfloat16 in flight, 256 programs for 2048 choices
    width = min(512, max(16, triton.next_power_of_2(H)))
    _gather_dot_kernel[(triton.cdiv(n, 8), T)](
        x_TH, weight_VH, ids_Tn, out_Tn, n, V, H, x_TH.stride(0), weight_VH.stride(0), ids_Tn.stride(0),
        EVEN_H=H % width == 0, BLOCK_N=8, BLOCK_H=width, num_warps=4,
    )  # fmt: skip
    return out_Tn
