"""The k best tokens of a dense head and its normaliser. B = rows, H = width, V = candidates, k = kept ones."""

from torch import Tensor

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.quantized_linear.reference import linear_reference


def head_topk_reference(x_BH: Tensor, weight: Tensor | Quantized, k: int, ids_V: Tensor | None = None) -> Best:
    """The k best of the logits x W^T; `ids_V` names the candidates (None: by their row). Ties: the first row."""
    best = best_reference(linear_reference(x_BH, weight), k)
    return best if ids_V is None else best._replace(ids_Bk=ids_V.long()[best.ids_Bk])
