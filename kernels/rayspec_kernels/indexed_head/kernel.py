"""A head over a shared set of rows, read where they lie: neither W[I] nor logits are ever written.

A row of 4096 bfloat16 is 8 KiB in one piece, so that gathering costs no bandwidth, only the wait for its index; where
the matrix is stored in the order of the list, a tile is a range of rows and that wait goes, too. Empty tiles read
nothing: a call costs what the chosen rows cost, however large the fixed number of tiles. Where groups of rows have
chosen their own, a tile is still read once, and counts for those that chose it.
"""

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.common.score_tiles import score_tiles
from rayspec_kernels.indexed_head.reference import Tiles


def indexed_head_kernel(
    x_BH: Tensor,
    weight: Tensor | Quantized,
    ids_L: Tensor,
    k: int,
    tiles: Tiles | None = None,
    is_listed_order: bool = False,
) -> Best:
    """Like the reference, for k up to 16; raises ValueError for layouts it does not take."""
    ranges_t2, size, is_of_tG = (None, None, None) if tiles is None else tiles
    return score_tiles(
        x_BH, weight, k, ids_L=ids_L, is_gathered=not is_listed_order, tiles_t2=ranges_t2, tile=size, is_of_tG=is_of_tG
    )
