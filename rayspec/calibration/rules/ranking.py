"""Tokens in the order in which a reduced head wants them, and what a prefix of that order covers. V = vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rayspec.calibration.vocabulary import Vocabulary


def rank(counts_V: Tensor, vocabulary: Vocabulary) -> Tensor:
    """All ids int64 [V]: stop tokens, the other usable ones by descending count, and last what no draft may use.

    Equal counts: the lower id first, so unseen tokens come in ascending order. Stop tokens come first because a
    position-aware head takes prefixes, and each must hold them.
    """
    by_count_V = counts_V.argsort(descending=True, stable=True)
    tier_V = torch.ones_like(counts_V)
    tier_V[list(vocabulary.stop_ids)] = 0
    tier_V[list(vocabulary.unusable_ids)] = 2
    return by_count_V[tier_V[by_count_V].argsort(stable=True)]


def coverage(counts_V: Tensor, ids_k: Tensor) -> Tensor:
    """Float64 [k]: the share of all counted tokens that the first 1, 2, ... k ids make up."""
    return counts_V[ids_k].cumsum(0).double() / int(counts_V.sum())


def check_size(size: int, vocabulary: Vocabulary, setting: str) -> None:
    """Raise ValueError unless a head may keep `size` tokens: the usable ones at most, or everything."""
    fewest, most = len(vocabulary.stop_ids), vocabulary.num_usable
    if not (fewest <= size <= most or size == vocabulary.size):
        raise ValueError(
            f"{setting} must be in {fewest} (the stop tokens)..{most} (the tokens that are neither special nor "
            f"padding), or {vocabulary.size} for the whole vocabulary; got {size}"
        )
