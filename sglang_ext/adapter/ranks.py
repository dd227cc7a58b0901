"""What tensor-parallel ranks do together: it succeeds on all of them, or all of them hear that it did not."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class OtherRankFailed(RuntimeError):
    """It succeeded here, and not on another rank, whose error the message holds."""


def on_all_ranks(group: Any, work: Callable[[], T]) -> T:
    """work() on each rank of SGLang's `group`. Raises its error, or OtherRankFailed where it raised on others alone."""
    try:
        result = work()
    except Exception as error:
        said_by_all(group, str(error) or type(error).__name__)
        raise
    for rank, said in enumerate(said_by_all(group, None)):
        if said is not None:
            raise OtherRankFailed(f"on tensor-parallel rank {rank}: {said}")
    return result


def said_by_all(group: Any, word: str | None) -> list[str | None]:
    """What every rank has said at this place, by rank."""
    if group.world_size == 1:
        return [word]
    words: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(words, word, group=group.cpu_group)
    return words
