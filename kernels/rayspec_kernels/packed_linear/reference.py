"""y = x W^T in plain torch. M = rows, K = inputs, N = outputs."""

from torch import Tensor
from torch.nn.functional import linear


def packed_linear_reference(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    return linear(x_MK, weight_NK)
