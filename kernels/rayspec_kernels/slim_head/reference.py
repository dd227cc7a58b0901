"""SlimSpec's low-rank head with its k best. B = rows, H = width, r = rank, V = vocabulary."""

from torch import Tensor

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.quantized_linear.reference import linear_reference


def slim_head_reference(x_BH: Tensor, down: Tensor | Quantized, up: Tensor | Quantized, k: int) -> Best:
    """The k best of the logits up (down x); what lies between is in the dtype of x. Ties: the lowest id."""
    return best_reference(linear_reference(linear_reference(x_BH, down), up), k)
