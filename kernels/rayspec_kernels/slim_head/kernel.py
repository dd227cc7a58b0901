"""SlimSpec's low-rank head with its k best; logits [B, V] are never written.

Three launches: down (a matrix of r x H, some 3% of the bytes), up with the k best of each program, merge.
B = rows, H = width, r = rank, V = vocabulary.
"""

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.score_tiles import score_tiles
from rayspec_kernels.quantized_linear.kernel import linear_kernel


def slim_head_kernel(x_BH: Tensor, down: Tensor | Quantized, up: Tensor | Quantized, k: int) -> Best:
    """Like the reference, for k up to 16; raises ValueError for layouts it does not take."""
    return score_tiles(linear_kernel(x_BH, down), up, k)
