"""y = x W^T for a weight in floating point or in fewer bits, in plain torch."""

from torch import Tensor
from torch.nn.functional import linear

from rayspec_kernels.common.quantized import Quantized, dequantize_reference


def linear_reference(x_BH: Tensor, weight: Tensor | Quantized) -> Tensor:
    """[B, N] in the dtype of x."""
    return linear(x_BH, weight if isinstance(weight, Tensor) else dequantize_reference(weight).to(x_BH.dtype))
