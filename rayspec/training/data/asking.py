"""Work that asks the target, cut into pieces each of which one engine answers from its beginning to its end.

A piece is a generator: it yields requests, is sent their answers, may ask again (the next turn of conversations), and
returns what it made. So whoever runs it decides where, and can begin it anew elsewhere if an engine dies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """One continuation that the target is asked for."""

    prompt_ids: Sequence[int]
    temperature: float  # 0 = greedy
    max_new_tokens: int
    stop_ids: tuple[int, ...] = ()  # beside those of the target
    seed: int | None = None  # for what is drawn, where the engine takes one (docs/training.md)


Asking = Generator[Sequence[Request], list[list[int]], T]
"""Yields requests, is sent the continuation of each (whose last token is the stop token that ended it), and returns."""


class Pool(Protocol):
    """What answers: engines on Ray."""

    def run(self, pieces: Mapping[int, Callable[[], Asking[T]]]) -> Iterator[tuple[int, T]]:
        """(number, result) of each piece, as they end; begun in the order of their numbers. A piece may be begun more
        than once, and gives one result."""
        ...


def in_order(results: Iterable[tuple[int, T]], numbers: Iterable[int]) -> Iterator[tuple[int, T]]:
    """The results in the order of `numbers`, each as soon as those before it are there."""
    held: dict[int, T] = {}
    waiting = iter(numbers)
    expected = next(waiting, None)
    for number, result in results:
        held[number] = result
        while expected in held:
            yield expected, held.pop(expected)
            expected = next(waiting, None)


def seed_of(purpose: str, seed: int, number: int) -> int:
    """The seed of a request, 48 bits: another one for each purpose, seed and number, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{purpose}/{seed}/{number}".encode()).digest()[:6], "big")
