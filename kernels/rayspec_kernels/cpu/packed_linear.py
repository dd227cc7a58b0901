"""y = x W^T on a CPU with the weight kept in oneDNN's blocked layout. M = rows, K = inputs, N = outputs.

Speculative decoding multiplies 2 to 64 rows at a time. There torch's default (BLAS on the plain layout) is several
times slower than at one row, so that verifying five tokens costs as much as decoding four; on the blocked layout it
costs little more than one (docs/results/archive/profile.md). The packed copy is made once; the plain weight stays with
its owner.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

# Below this many weight elements a single row is faster on the plain layout (call overhead against bandwidth).
_SMALL_WEIGHT = 1 << 20

# the overload itself: resolving it anew costs microseconds in every call
_ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch can keep `weight` in oneDNN's layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
    )


def linear_of_rows(x_MK: Tensor, rows_NK: Tensor) -> Tensor:
    """x W^T of rows that were gathered for this one call. oneDNN takes plain rows, too; with ten rows of x it took half
    as long as torch's default for 8,192 rows of 576 (0.5 and 1.2 ms), in float32."""
    if not can_pack(rows_NK):
        return x_MK @ rows_NK.mT
    assert _ONEDNN_LINEAR is not None, "can_pack says so"
    return _ONEDNN_LINEAR(x_MK, rows_NK, None, "none", [], "")


class PackedLinear:
    """A weight [N, K] float32 and its packed copy; call it with x [M, K] float32."""

    def __init__(self, weight_NK: Tensor) -> None:
        assert can_pack(weight_NK), f"cannot pack {weight_NK.dtype} {tuple(weight_NK.shape)} on {weight_NK.device}"
        self.weight_NK = weight_NK.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight_NK.contiguous(), None)

    def __call__(self, x_MK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        if x_MK.shape[0] == 1 and self.weight_NK.numel() < _SMALL_WEIGHT:
            return linear(x_MK, self.weight_NK, bias_N)
        assert _ONEDNN_LINEAR is not None, "can_pack says so"
        return _ONEDNN_LINEAR(x_MK, self.packed, bias_N, "none", [], "")
