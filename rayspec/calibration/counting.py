"""Token counts on Ray Data: every task counts its own part, the driver adds up. V = vocabulary.

A partial count is a batch {`id`: int64, `count`: int64}, in which an id may come more than once once parts are joined.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

if TYPE_CHECKING:
    import ray.data


def partial_counts(ids: np.ndarray) -> dict[str, np.ndarray]:
    """Of token ids."""
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


def batches(parts: ray.data.Dataset) -> Iterable[dict[str, Any]]:
    """The dataset's partial counts as they come in."""
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # one of ours instead of one an operator
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return parts.iter_batches(batch_size=None, batch_format="numpy")
