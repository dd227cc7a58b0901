"""A head whose rows are split over ranks: the k best of the whole one from those of its shards, in plain torch.

A rank computes the k best of its rows with any fused head, names them as the whole head does (`of_shard`) and hands
over k scores, k ids and one log-sum-exp a row instead of its share of the logits; after an all-gather every rank merges
the same numbers. B = rows, k = kept ones.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from rayspec_kernels.common.best import Best, best_reference


def of_shard(best: Best, row_start: int, k: int, stride: int = 1) -> Best:
    """The k best of a shard whose rows are row `row_start` of the whole matrix and every `stride`-th behind it, as the
    whole head names them. A shard may know of fewer than k: the rest has score -inf and id -1, so that all ranks hand
    over equal shapes."""
    missing = k - best.scores_Bk.shape[1]
    if missing < 0:
        raise ValueError(f"k must be at least the {best.scores_Bk.shape[1]} candidates of the shard, got {k}")
    ids_Bk = torch.where(best.ids_Bk < 0, -1, best.ids_Bk * stride + row_start)
    scores_Bk = pad(best.scores_Bk, (0, missing), value=float("-inf"))
    return Best(scores_Bk, pad(ids_Bk, (0, missing), value=-1), best.log_norm_B)


def merge_shards(shards: Sequence[Best], k: int) -> Best:
    """The k best and the normaliser of the whole head. Each shard gives its own k best, or all that it has.

    As if the head had never been split: of equal scores the lowest id comes first, whatever the order of the shards,
    NaN counts as the largest, and only where fewer than k candidates exist at all is an id -1. The normaliser is that
    of the whole up to rounding. (A kernel may tile a shard otherwise than the whole matrix, which can move the last bit
    of a score; the merge moves none.) Static shapes, nothing synchronises.
    """
    scores_Bn, ids_Bn = (torch.cat([shard[i] for shard in shards], dim=1) for i in (0, 1))
    last = torch.iinfo(ids_Bn.dtype).max  # no candidate comes behind one of score -inf
    by_id_Bn = torch.where(ids_Bn < 0, last, ids_Bn).argsort(dim=1)
    best = best_reference(scores_Bn.gather(1, by_id_Bn), k)
    ids_Bk = ids_Bn.gather(1, by_id_Bn).gather(1, best.ids_Bk)
    return Best(best.scores_Bk, ids_Bk, torch.stack([shard.log_norm_B for shard in shards]).logsumexp(dim=0))
