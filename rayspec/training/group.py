"""The workers that train one drafter together: what the loop needs of torch.distributed.

Each worker holds the whole drafter and its optimizers, and computes the gradients of its own part of every update's
sequences. They are added up once, after the last backward pass: the trainer goes backward chunk by chunk into leaf
gradients (ttt.py), where the hooks of DistributedDataParallel would reduce after the first chunk. What follows from the
sum (clipping, the optimizers' step) is the same computation on every worker, so that their weights stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed


@dataclass(frozen=True)
class Group:
    """This worker among `size`; one alone does not communicate."""

    rank: int = 0
    size: int = 1

    @classmethod
    def joined(cls) -> Group:
        """The process group that this process has joined."""
        return cls(distributed.get_rank(), distributed.get_world_size())

    @property
    def is_writer(self) -> bool:
        """Whether this worker, alone of all, writes checkpoints, MLflow and the export."""
        return self.rank == 0

    def part(self, indices: Tensor, pieces: int) -> list[Tensor]:
        """This worker's `pieces` of the sequences of an update, in their order; the sizes of any two differ by one at
        most. There must be `size * pieces` sequences, so that none is empty."""
        assert len(indices) >= self.size * pieces, "Recipe and DrafterTrainConfig refuse more pieces than sequences"
        return list(indices.tensor_split(self.size * pieces)[self.rank * pieces : (self.rank + 1) * pieces])

    @torch.no_grad()
    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over the workers, in place."""
        if self.size > 1:
            for tensor in tensors:
                distributed.all_reduce(tensor)

    @torch.no_grad()
    def copy_first_(self, tensors: Iterable[Tensor]) -> None:
        """Make each tensor what it is on the first worker, in place."""
        if self.size > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, src=0)

    def first_of(self, found: str | None) -> str | None:
        """What the first of those workers that have found something says, on all of them; None where none has."""
        if self.size == 1:
            return found
        gathered: list[str | None] = [None] * self.size
        distributed.all_gather_object(gathered, found)
        return next((text for text in gathered if text is not None), None)


ALONE = Group()
