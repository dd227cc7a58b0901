"""What tensor-parallel ranks do together: it succeeds on all of them, or all of them hear that it did not."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from sglang_ext.adapter.internals import BARRIER
from sglang_ext.adapter.patches import lent

T = TypeVar("T")


class RanksDiffer(RuntimeError):
    """It succeeded on some ranks and not on others, one of whose errors the message holds."""


def on_all_ranks(group: Any, work: Callable[[], T]) -> T:
    """work(), which must not wait for another rank, on each rank of SGLang's `group`. Raises its error where it fails
    on all of them, and RanksDiffer on each where it fails on some."""
    try:
        result = work()
    except Exception as error:
        _meet(group, error, error)
        raise
    _meet(group)
    return result


def in_step(group: Any, work: Callable[[], T]) -> T:
    """work(), in which ranks wait for each other at barriers of SGLang's `group` as they do while they capture graphs,
    on each rank. One that fails says so where the others wait next, at a barrier or at the end, so that none waits for
    it or goes on alone. Raises its error where it fails on all ranks at the same place, and RanksDiffer otherwise, with
    the cause of that error.

    What it cannot end is a wait that is no barrier: for a reduction on the GPU of a pass that another rank has left,
    or for what SGLang's custom all-reduce exchanges as a capture ends. Ranks meet in a group of their own, so that
    what they say is never taken for that.
    """
    if group.world_size == 1:
        return work()
    with _apart(group) as meeting:
        return _in_step(group, meeting, work)


@contextmanager
def _apart(group: Any) -> Iterator[Any]:
    """The same ranks, with messages of their own."""
    ranks = torch.distributed.get_process_group_ranks(group.cpu_group)
    own = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
    try:
        yield SimpleNamespace(world_size=group.world_size, cpu_group=own)
    finally:
        torch.distributed.destroy_process_group(own)


def _in_step(group: Any, meeting: Any, work: Callable[[], T]) -> T:
    waits = pkgutil.resolve_name(BARRIER.target)
    heard: list[RanksDiffer] = []

    def barrier(other: Any) -> None:
        if other.cpu_group is not group.cpu_group:
            waits(other)
            return
        try:
            _meet(meeting)
        except RanksDiffer as error:
            heard.append(error)
            raise

    try:
        with lent(BARRIER.target, barrier):
            result = work()
    except Exception as error:
        if heard:  # of which others may have made an error of their own
            raise heard[0] from error
        _meet(meeting, error, error.__cause__ or error)
        raise
    _meet(meeting)
    return result


def _meet(group: Any, failed: Exception | None = None, reason: BaseException | None = None) -> None:
    """Where all ranks come, with what has failed on this one and why. Raises RanksDiffer where that is so on some."""
    said = said_by_all(group, None if reason is None else str(reason) or type(reason).__name__)
    errors = [(rank, words) for rank, words in enumerate(said) if words is not None]
    if errors and len(errors) < len(said):
        raise RanksDiffer("on tensor-parallel rank {}: {}".format(*errors[0])) from failed


def said_by_all(group: Any, word: str | None) -> list[str | None]:
    """What every rank has said at this place, by rank."""
    if group.world_size == 1:
        return [word]
    words: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(words, word, group=group.cpu_group)
    return words
