"""The k best scores of each row with their normaliser, in plain torch. B = rows, n = scores a row, k = kept ones."""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_K = 16  # of the kernels; more than a draft tree asks of a row


class Best(NamedTuple):
    """log q(id) = scores - log_norm. Where fewer than k candidates exist the rest has score -inf and id -1."""

    scores_Bk: Tensor  # float32 (float64 of float64), best first
    ids_Bk: Tensor  # int64
    log_norm_B: Tensor  # like the scores: log-sum-exp over all candidates


def best_reference(scores_Bn: Tensor, k: int) -> Best:
    """Ties: the lowest column first. NaN counts as the largest score, so that a fault shows, and makes the norm NaN."""
    if not 1 <= k <= scores_Bn.shape[1]:
        raise ValueError(f"k must be in 1..{scores_Bn.shape[1]} (the candidates), got {k}")
    if scores_Bn.dtype.itemsize < 4:
        scores_Bn = scores_Bn.float()
    ordered_Bn, columns_Bn = scores_Bn.sort(dim=1, descending=True, stable=True)
    return Best(ordered_Bn[:, :k], columns_Bn[:, :k], scores_Bn.logsumexp(dim=1))


def fake_best(x_BH: Tensor, k: int) -> Best:
    """Shapes and types of what a kernel gives, for tracing."""
    scores_Bk = x_BH.new_empty(len(x_BH), k, dtype=torch.float32)
    return Best(scores_Bk, torch.empty_like(scores_Bk, dtype=torch.int64), torch.empty_like(scores_Bk[:, 0]))
