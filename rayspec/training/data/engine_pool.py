"""Pieces of work handed to engines one by one: an engine that has finished one takes the next, and waits for no other.

When an engine dies, its piece goes back to the front of the queue, where whichever engine is free begins it anew, and
the engine is started again, at most `restarts` times; then the others go on without it, as they do without one that
never starts. Engines that share a GPU start one after the other. Knows no Ray: `wait` does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rayspec.farm.runtime import EngineDied, EngineFailed
from rayspec.records import Generated
from rayspec.training.data.asking import Asking, Request

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a pool asks of an engine (`RuntimeHandle`); references are whatever `wait` takes."""

    def begin_start(self) -> Any: ...
    def finish_start(self, ref: Any, timeout_s: float) -> Any: ...
    def begin_generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> Any: ...
    def finish_generate(self, ref: Any) -> list[Generated]: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...


Wait = Callable[[Sequence[Any], float], Sequence[Any]]
"""The references that are ready, as soon as one is or after so many seconds."""


@dataclass(frozen=True)
class Piece:
    number: int
    asking: Asking[Any]


@dataclass(eq=False)
class Place:
    """An engine and what it is doing: starting (`ref` without `piece`), answering (both), or nothing (neither)."""

    number: int
    engine: Engine = field(init=False)  # from the first start on
    ref: Any = None
    deadline: float = 0.0
    piece: Piece | None = None
    deaths: int = 0
    has_started: bool = False

    @property
    def is_starting(self) -> bool:
        return self.ref is not None and self.piece is None


@dataclass
class EnginePool:
    """`make(place, start, beside)`: an engine that is not started yet, `start` counted from 0, and `beside` how many
    others are up on its GPU, which `per_gpu` places in a row share. `Pool` of asking.py.

    Raises EngineFailed: from `start` and `run` where an engine does not start before any has, where one refuses a
    request, and where all have died too often.
    """

    count: int
    make: Callable[[int, int, int], Engine]
    wait: Wait
    restarts: int
    start_timeout_s: float
    batch_timeout_s: float
    stop_ids: Sequence[int] = ()
    per_gpu: int = 1
    _waiting: list[Place] = field(default_factory=list)  # for their turn to start
    _places: list[Place] = field(default_factory=list)

    def start(self) -> None:
        """Begin to start engines, all of them or one a GPU that is shared, and wait until one is up."""
        self._waiting = [Place(n) for n in range(self.count)]
        self._begin_starts()
        while not any(place.ref is None for place in self._places):
            self._settle(deque())

    def run(self, pieces: Mapping[int, Callable[[], Asking[T]]]) -> Iterator[tuple[int, T]]:
        queue = deque(sorted(pieces))
        while queue or any(place.piece for place in self._places):
            for place in self._places:
                if place.ref is None and queue:
                    number = queue.popleft()
                    place.piece = Piece(number, pieces[number]())
                    yield from self._go_on(place, None)
            if any(place.ref is not None for place in self._places):
                yield from self._settle(queue)

    def stop(self) -> None:
        """End every engine; at once where it is busy."""
        for place in self._places:
            (place.engine.stop if place.ref is None else place.engine.kill)()
        self._places, self._waiting = [], []

    def kill(self) -> None:
        for place in self._places:
            place.engine.kill()
        self._places, self._waiting = [], []

    def _settle(self, queue: deque[int]) -> list[tuple[int, Any]]:
        """Wait for the next engines that have done what they were asked, or failed; what was finished by it."""
        busy = [place for place in self._places if place.ref is not None]
        soonest = min(place.deadline for place in busy)
        ready = self.wait([place.ref for place in busy], max(0.0, soonest - time.monotonic()))
        found: list[tuple[int, Any]] = []
        for place in busy:
            if place.ref not in ready and place.deadline > time.monotonic():
                continue
            try:
                if place.ref not in ready:
                    self._give_up(place)
                found += self._finish(place)
            except EngineFailed as error:
                if place.piece is not None and not isinstance(error, EngineDied):
                    raise  # a request that is refused
                self._bury(place, queue, error)
        self._begin_starts()
        return found

    def _finish(self, place: Place) -> list[tuple[int, Any]]:
        if place.piece is None:
            place.engine.finish_start(place.ref, self.start_timeout_s)
            place.ref, place.has_started = None, True
            return []
        answers = [generated.output_ids for generated in place.engine.finish_generate(place.ref)]
        return self._go_on(place, answers)

    def _go_on(self, place: Place, answers: list[list[int]] | None) -> list[tuple[int, Any]]:
        """Hand answers to the piece of an engine, and ask what it asks next; its result if that was all."""
        assert place.piece is not None, "asked for only where there is one"
        place.ref = None
        try:
            # None begins a generator
            requests = next(place.piece.asking) if answers is None else place.piece.asking.send(answers)
        except StopIteration as end:
            number, place.piece = place.piece.number, None
            return [(number, end.value)]
        prompts = [list(request.prompt_ids) for request in requests]
        place.ref = place.engine.begin_generate(prompts, [sampling_params(r, self.stop_ids) for r in requests])
        place.deadline = time.monotonic() + self.batch_timeout_s
        return []

    def _begin_starts(self) -> None:
        """Begin those that wait for no other of their GPU: what an engine may take is a share of what is free there."""
        for place in list(self._waiting):
            beside = [p for p in self._places if p.number // self.per_gpu == place.number // self.per_gpu]
            if any(p.is_starting for p in beside):
                continue
            self._waiting.remove(place)
            place.engine = self.make(place.number, place.deaths, len(beside))
            place.ref = place.engine.begin_start()
            place.deadline = time.monotonic() + self.start_timeout_s
            self._places = sorted([*self._places, place], key=lambda p: p.number)

    def _give_up(self, place: Place) -> None:
        if place.piece is None:
            what = (
                f"did not start within engines.start_timeout_s={self.start_timeout_s:g} s; raise it, or ask for no "
                "more than there is of CPUs and GPUs (engines.count, engines.num_cpus, engines.num_gpus)"
            )
        else:
            what = (
                f"did not answer within engines.batch_timeout_s={self.batch_timeout_s:g} s; raise it, or lower "
                "answers.batch_size"
            )
        raise EngineDied(f"engine {place.number} {what}")

    def _bury(self, place: Place, queue: deque[int], error: EngineFailed) -> None:
        """Take the piece of a dead engine back, and start the engine again: what it needs may not be free yet. One that
        has died too often is left out, and so is one that never started while another has: their settings are the same,
        so that its place is at fault. Raises the error where none is left, and where none has started."""
        place.engine.kill()
        if not any(other.has_started for other in (*self._places, *self._waiting)):
            raise error
        if not place.has_started:
            self._places.remove(place)
            logger.warning("engine %d is left out, the others go on: %s", place.number, error)
            return
        place.deaths += 1
        if place.piece is not None:
            queue.appendleft(place.piece.number)
        place.piece = place.ref = None
        self._places.remove(place)
        if place.deaths > self.restarts:
            if not self._places and not self._waiting:
                raise EngineFailed(
                    f"every engine died more than engines.restarts={self.restarts} times; what was finished is kept, "
                    f"and the same command goes on from there. The last one: {error}"
                ) from error
            logger.warning(
                "engine %d died %d times and is left out; the last time: %s", place.number, place.deaths, error
            )
            return
        logger.warning("engine %d died and is started again: %s", place.number, error)
        self._waiting.append(place)


def sampling_params(request: Request, stop_ids: Sequence[int]) -> dict[str, Any]:
    """SGLang's, of one request."""
    return {
        "temperature": request.temperature,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": [*stop_ids, *request.stop_ids],
        "skip_special_tokens": False,
        **({} if request.seed is None else {"sampling_seed": request.seed}),
    }
