"""Counts of tokens, or of neighbouring pairs of them, on Ray Data: every task counts its own part, the driver adds up.

A partial count is a batch {`id`: int64, `count`: int64}, in which an id may come more than once once parts are joined.
The id of a pair is `pair_ids`'. V = vocabulary, P = distinct pairs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

if TYPE_CHECKING:
    import ray.data


class PairCounts(NamedTuple):
    """A CSR matrix [V, V], all int64: row x holds how often each y came right after x."""

    indptr: Tensor  # [V + 1]
    ids_P: Tensor  # y, ascending within a row
    counts_P: Tensor

    @property
    def second_V(self) -> Tensor:
        """How often each token came second."""
        return torch.zeros(len(self.indptr) - 1, dtype=torch.int64).index_add_(0, self.ids_P, self.counts_P)


PAIR_BASE = 2**32  # of a pair's id; larger than any vocabulary
PENDING_PAIRS = 4_000_000  # merged at once, 64 MB


def pair_ids(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Ids of pairs of tokens, int64."""
    return first.astype(np.int64) * PAIR_BASE + second


def partial_counts(ids: np.ndarray) -> dict[str, np.ndarray]:
    """How often each token id occurs."""
    distinct, counts = np.unique(ids, return_counts=True)
    return {"id": distinct.astype(np.int64), "count": counts.astype(np.int64)}


def add_up(parts: Iterable[dict[str, Any]], vocab_size: int, name: str) -> Tensor:
    """Counts int64 [V] of partial ones; `name` is the source's, for the progress bar and errors.

    Raises ValueError if there is no token, or one that the target does not have.
    """
    total_V = np.zeros(vocab_size, dtype=np.int64)
    with tqdm(desc=f"count {name}", unit="token", unit_scale=True) as bar:
        for part in parts:
            ids, counts = np.asarray(part["id"]), np.asarray(part["count"])
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"sources.{name} holds token {ids.max()}, but the target has {vocab_size} tokens")
            np.add.at(total_V, ids, counts)
            bar.update(int(counts.sum()))
    if not total_V.any():
        raise ValueError(f"sources.{name} holds no token to count; give it documents or answers that are not empty")
    return torch.from_numpy(total_V)


def add_up_pairs(parts: Iterable[dict[str, Any]], vocab_size: int, name: str) -> PairCounts:
    """Counts of all pairs; memory grows with the number of distinct ones alone. Raises ValueError as `add_up`."""
    ids, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    pending: list[tuple[np.ndarray, np.ndarray]] = []

    def merged() -> tuple[np.ndarray, np.ndarray]:
        distinct, place = np.unique(np.concatenate([ids, *(i for i, _ in pending)]), return_inverse=True)
        total = np.zeros(len(distinct), dtype=np.int64)
        np.add.at(total, place, np.concatenate([counts, *(c for _, c in pending)]))
        pending.clear()
        return distinct, total

    with tqdm(desc=f"count pairs of {name}", unit="pair", unit_scale=True) as bar:
        for part in parts:
            pending.append((np.asarray(part["id"]), np.asarray(part["count"])))
            bar.update(int(pending[-1][1].sum()))
            if sum(len(i) for i, _ in pending) > PENDING_PAIRS:
                ids, counts = merged()
    ids, counts = merged()
    if not len(ids):
        raise ValueError(f"sources.{name} holds no pair of tokens to count; give it answers that are not empty")
    x, y = ids // PAIR_BASE, ids % PAIR_BASE
    if max(x.max(), y.max()) >= vocab_size:
        raise ValueError(f"sources.{name} holds token {max(x.max(), y.max())}, but the target has {vocab_size} tokens")
    indptr = np.concatenate([[0], np.bincount(x, minlength=vocab_size).cumsum()])
    return PairCounts(*(torch.from_numpy(a.astype(np.int64)) for a in (indptr, y, counts)))


def batches(parts: ray.data.Dataset) -> Iterable[dict[str, Any]]:
    """The dataset's partial counts as they come in."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # one of ours instead of one an operator
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return parts.iter_batches(batch_size=None, batch_format="numpy")
