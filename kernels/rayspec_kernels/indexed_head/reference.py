"""A head over a set of rows that a batch shares (DynaSpec), with its k best.

B = rows, H = width, V = rows of the matrix, L = listed candidates, t = tiles, k = kept ones, G = groups of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.quantized import Quantized
from rayspec_kernels.quantized_linear.reference import linear_reference


class Tiles(NamedTuple):
    """Ranges of a list of candidates. A fixed number of them: those at the end are empty."""

    ranges_t2: Tensor  # int32: first place in the list, count in 0..size
    size: int  # a power of two, 16..256
    # int8: 1 where a group's rows score the range. Groups are equally many rows, side by side. None: all rows score all
    is_of_tG: Tensor | None = None

    def of_group(self, group: int) -> "Tiles":
        """As if the group were alone: the ranges of the others are empty."""
        assert self.is_of_tG is not None, "all rows score the same"
        return Tiles(self.ranges_t2 * self.is_of_tG[:, group, None], self.size)


def chosen_places(tiles: Tiles) -> Tensor:
    """The places that the ranges name, in order, and -1 for the rest: int64 [t * size]."""
    first_t1, count_t1 = tiles.ranges_t2.long().split(1, dim=1)
    place_s = torch.arange(tiles.size, device=first_t1.device)
    places = torch.where(place_s < count_t1, first_t1 + place_s, -1).flatten()
    return places[(places < 0).to(torch.int8).argsort(stable=True)]


def indexed_head_reference(
    x_BH: Tensor,
    weight: Tensor | Quantized,
    ids_L: Tensor,
    k: int,
    tiles: Tiles | None = None,
    is_listed_order: bool = False,
) -> Best:
    """The k best of the logits of chosen candidates and the log-sum-exp over them.

    `ids_L` lists candidates by id, -1 (at its end) for none; `tiles` chooses ranges of the list, None all of it. The
    row of a candidate is its id, or its place in the list where the matrix `is_listed_order` (no -1 then). Ties: the
    first listed.
    """
    if tiles is not None and tiles.is_of_tG is not None:
        groups_rH = x_BH.chunk(tiles.is_of_tG.shape[1])
        alone = [
            indexed_head_reference(x_rH, weight, ids_L, k, tiles.of_group(group), is_listed_order)
            for group, x_rH in enumerate(groups_rH)
        ]
        return Best(*map(torch.cat, zip(*alone, strict=True)))
    place_n = torch.arange(len(ids_L), device=ids_L.device) if tiles is None else chosen_places(tiles)
    id_n = torch.where(place_n < 0, -1, ids_L.long()[place_n.clamp(min=0)])
    row_n = (place_n if is_listed_order else id_n).clamp(min=0)
    rows = weight[row_n] if isinstance(weight, Tensor) else weight.rows(row_n)
    scores_Bn = linear_reference(x_BH, rows).masked_fill(id_n < 0, float("-inf"))
    best = best_reference(scores_Bn, k)
    return best._replace(ids_Bk=id_n[best.ids_Bk])
