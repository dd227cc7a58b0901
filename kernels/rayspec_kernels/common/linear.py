"""y = x W^T for a weight in floating point or in fewer bits, in plain torch."""

from torch import Tensor
from torch.nn.functional import linear

from rayspec_kernels.quantized_linear.reference import Quantized, quantized_linear_reference


def linear_reference(x_BH: Tensor, weight: Tensor | Quantized) -> Tensor:
    return linear(x_BH, weight) if isinstance(weight, Tensor) else quantized_linear_reference(x_BH, weight)
