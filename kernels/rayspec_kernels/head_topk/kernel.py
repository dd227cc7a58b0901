"""The k best tokens of a dense head in one pass over its matrix; logits [B, V] are never written.

A program keeps the k best of its tile of rows and their share of the log-sum-exp (common/score_tiles.py), a second
launch merges the programs' (common/topk.py). B = rows, H = width, V = candidates, k = kept ones.
"""

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.score_tiles import score_tiles


def head_topk_kernel(x_BH: Tensor, weight: Tensor | Quantized, k: int, ids_V: Tensor | None = None) -> Best:
    """Like the reference, for k up to 16; raises ValueError for layouts it does not take."""
    return score_tiles(x_BH, weight, k, ids_L=ids_V)
