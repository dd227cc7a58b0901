"""What tensor-parallel ranks do together: it succeeds on all of them, or all of them hear that it did not."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class RanksDiffer(RuntimeError):
    """It succeeded on some ranks and not on others, one of whose errors the message holds."""


def on_all_ranks(group: Any, work: Callable[[], T]) -> T:
    """work(), which must not wait for another rank, on each rank of SGLang's `group`. Raises its error where it fails
    on all of them, and RanksDiffer on each where it fails on some."""
    result, failed = None, None
    try:
        result = work()
    except Exception as error:
        failed = error
    said = said_by_all(group, None if failed is None else str(failed) or type(failed).__name__)
    errors = [(rank, words) for rank, words in enumerate(said) if words is not None]
    if errors and len(errors) < len(said):
        raise RanksDiffer("on tensor-parallel rank {}: {}".format(*errors[0])) from failed
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]  # it has not failed


def said_by_all(group: Any, word: str | None) -> list[str | None]:
    """What every rank has said at this place, by rank."""
    if group.world_size == 1:
        return [word]
    words: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(words, word, group=group.cpu_group)
    return words
