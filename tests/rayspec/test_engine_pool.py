"""Which engine gets which piece of work, and what becomes of it when engines die; the engines do what they are told."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rayspec.farm.runtime import EngineDied, EngineFailed
from rayspec.records import Generated
from rayspec.training.data.asking import Asking, Request, in_order, seed_of
from rayspec.training.data.engine_pool import EnginePool, sampling_params

STOP = 2


class Told:
    """Continues each prompt by its first token plus one. `fails`: raised instead of the answers, in turn."""

    def __init__(self, world: "World", place: int, start: int) -> None:
        self.world, self.place, self.start = world, place, start
        self.is_alive = True

    def begin_start(self) -> Any:
        return self.world.ref(self, None)

    def finish_start(self, ref: int, timeout_s: float) -> None:
        self.world.log.append(f"{self.place} is up")
        self.world.fail(self.place, f"start {self.start}")

    def begin_generate(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> Any:
        assert self.is_alive
        self.world.asked.append((self.place, prompts[0][0], sampling[0]))
        return self.world.ref(self, prompts)

    def finish_generate(self, ref: int) -> list[Generated]:
        prompts = self.world.refs[ref][1]
        self.world.fail(self.place, prompts[0][0])
        return [Generated(output_ids=[p[0] + 1], verify_steps=0) for p in prompts]

    def stop(self) -> None:
        self.is_alive = False

    kill = stop


class World:
    """`order(engines that are busy)`: the place of the one that is ready next, None if none is before a deadline."""

    def __init__(self, order: Callable[[list[int]], int | None] = lambda busy: busy[0]) -> None:
        self.order = order
        self.refs: dict[int, tuple[Told, Any]] = {}
        self.numbers = itertools.count()
        self.asked: list[tuple[int, int, dict[str, Any]]] = []
        self.made: list[Told] = []
        self.log: list[str] = []  # starts, as they begin and end
        self.failures: dict[tuple[int, Any], list[Exception]] = {}

    def ref(self, engine: Told, prompts: Any) -> int:
        number = next(self.numbers)
        self.refs[number] = (engine, prompts)
        return number

    def fail(self, place: int, at: Any) -> None:
        waiting = self.failures.get((place, at))
        if waiting:
            raise waiting.pop(0)

    def make(self, place: int, start: int, beside: int) -> Told:
        self.made.append(Told(self, place, start))
        self.log.append(f"{place} beside {beside}")
        return self.made[-1]

    def wait(self, refs: Sequence[int], timeout_s: float) -> list[int]:
        assert timeout_s >= 0
        busy = {self.refs[ref][0].place: ref for ref in refs}
        place = self.order(list(busy))
        return [] if place is None else [busy[place]]

    def pool(self, count: int = 2, **options: Any) -> EnginePool:
        limits = {"restarts": 3, "start_timeout_s": 1200.0, "batch_timeout_s": 7200.0}
        pool = EnginePool(count, self.make, self.wait, stop_ids=[STOP], **limits | options)
        pool.start()
        return pool


def piece(number: int, turns: int = 1) -> Callable[[], Asking[list[int]]]:
    """Asks with tokens number, number + 100 ...; gives what it was told."""

    def asking() -> Asking[list[int]]:
        told = []
        for turn in range(turns):
            answers = yield [Request([number + 100 * turn], 0.0, 4)]
            told.append(answers[0][0])
        return told

    return asking


def pieces(count: int, turns: int = 1) -> dict[int, Callable[[], Asking[list[int]]]]:
    return {n: piece(n, turns) for n in range(count)}


def test_an_engine_takes_the_next_piece_when_it_is_free_and_waits_for_no_other() -> None:
    """The first engine needs longer for its piece than the other one for all the rest."""
    world = World()
    pool = world.pool(2)
    world.order = lambda busy: busy[-1]
    found = list(pool.run(pieces(5)))
    assert [n for n, _ in found] == [1, 2, 3, 4, 0]
    assert dict(found) == {n: [n + 1] for n in range(5)}
    assert [place for place, _, _ in world.asked] == [0, 1, 1, 1, 1]


def test_a_piece_stays_with_its_engine_from_turn_to_turn() -> None:
    turn = itertools.cycle([0, 1])
    world = World(order=lambda busy: next(n for n in turn if n in busy))
    found = dict(world.pool(2).run(pieces(4, turns=3)))
    assert found == {n: [n + 1, n + 101, n + 201] for n in range(4)}
    by_piece = {n: {place for place, token, _ in world.asked if token % 100 == n} for n in range(4)}
    assert all(len(places) == 1 for places in by_piece.values())
    assert {p for places in by_piece.values() for p in places} == {0, 1}


def test_work_begins_with_the_first_engine_that_is_up() -> None:
    """The other one never is."""
    world = World(order=lambda busy: 0 if 0 in busy else None)
    assert len(list(world.pool(2).run(pieces(3)))) == 3
    assert {place for place, _, _ in world.asked} == {0}


def test_engines_of_a_gpu_start_one_after_the_other() -> None:
    """What each may take is a share of what is free when it starts, so those before it must have taken theirs."""
    world = World()
    pool = world.pool(5, per_gpu=2)  # two GPUs for two engines each, and one for the last
    begun, *later = world.log
    assert [begun, *later[:2]] == ["0 beside 0", "2 beside 0", "4 beside 0"], "one a GPU at once"
    assert later[2:] == ["0 is up", "1 beside 1"], "the next one of the GPU"
    assert len(list(pool.run(pieces(20)))) == 20
    together = World()
    together.pool(3)
    assert together.log[:3] == ["0 beside 0", "1 beside 0", "2 beside 0"], "on a GPU each they do not wait"


def test_an_engine_that_died_waits_for_a_start_on_its_gpu() -> None:
    world = World(order=lambda busy: min(busy))
    pool = world.pool(2, per_gpu=2, restarts=2)
    world.failures[(0, 0)] = [EngineDied("out of memory")]  # while the other one starts
    assert len(list(pool.run(pieces(4)))) == 4
    expected = ["0 beside 0", "0 is up", "1 beside 1", "1 is up", "0 beside 1", "0 is up"]
    assert world.log[: len(expected)] == expected
    assert [e.place for e in world.made if e.is_alive] == [1, 0]


def test_the_piece_of_an_engine_that_died_is_made_once_by_another(caplog: pytest.LogCaptureFixture) -> None:
    world = World(order=lambda busy: busy[-1])
    world.failures[(1, 101)] = [EngineDied("out of memory")]  # in the second turn of piece 1
    found = list(world.pool(2, restarts=1).run(pieces(4, turns=2)))
    assert sorted(found) == [(n, [n + 1, n + 101]) for n in range(4)], "each once"
    assert [(e.place, e.start, e.is_alive) for e in world.made] == [(0, 0, True), (1, 0, False), (1, 1, True)]
    assert "engine 1 died and is started again: out of memory" in caplog.text
    assert [token for _, token, _ in world.asked if token % 100 == 1].count(1) == 2, "from its first turn on"


def test_an_engine_that_dies_too_often_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    world = World(order=lambda busy: busy[-1])
    world.failures = {(1, n): [EngineDied("bad card")] for n in range(6)}
    found = list(world.pool(2, restarts=2).run(pieces(6)))
    assert sorted(n for n, _ in found) == list(range(6))
    assert len([e for e in world.made if e.place == 1]) == 3
    assert "engine 1 died 3 times and is left out; the last time: bad card" in caplog.text


def test_where_all_died_too_often_the_cause_is_said() -> None:
    world = World()
    world.failures[(0, 1)] = [EngineDied("no memory")] * 9
    with pytest.raises(EngineFailed, match=r"more than engines.restarts=2 times; what was finished is kept.*no memory"):
        list(world.pool(1, restarts=2).run(pieces(3)))
    assert len(world.made) == 3
    assert [token for _, token, _ in world.asked] == [0, 1, 1, 1]


def test_a_start_that_fails_is_tried_again_only_where_the_engine_ran_before() -> None:
    world = World()
    world.failures[(0, "start 0")] = [EngineFailed("unknown option")]
    with pytest.raises(EngineFailed, match="unknown option"):
        world.pool(1)
    world = World()
    world.failures = {(0, 0): [EngineDied("killed")], (0, "start 1"): [EngineFailed("memory is not free yet")]}
    assert dict(world.pool(1, restarts=2).run(pieces(2))) == {0: [1], 1: [2]}
    assert [e.start for e in world.made] == [0, 1, 2]


@pytest.mark.parametrize("at", ["timeout", "error"])
def test_an_engine_that_never_starts_is_left_out_where_another_is_up(at: str, caplog: pytest.LogCaptureFixture) -> None:
    """As on a cluster with fewer GPUs than engines, or with a bad one."""
    world = World(order=lambda busy: 0 if 0 in busy else 1 if at == "error" else None)
    pool = world.pool(2)
    assert [place.number for place in pool._places] == [0, 1]
    if at == "error":
        world.failures[(1, "start 0")] = [EngineFailed("bad card")]
        world.order = lambda busy: busy[-1]
    else:
        pool._places[1].deadline = 0.0
    assert len(list(pool.run(pieces(3)))) == 3
    assert {place for place, _, _ in world.asked} == {0}
    assert [(e.place, e.is_alive) for e in world.made] == [(0, True), (1, False)], "and is not tried again"
    assert "engine 1 is left out, the others go on: " in caplog.text
    assert ("bad card" if at == "error" else "did not start within engines.start_timeout_s=1200 s") in caplog.text


def test_a_request_that_is_refused_stops_the_run() -> None:
    """It would be refused everywhere."""
    world = World()
    world.failures[(0, 1)] = [EngineFailed("prompt too long")]
    run = world.pool(1).run(pieces(3))
    assert next(run) == (0, [1])
    with pytest.raises(EngineFailed, match="prompt too long"):
        next(run)


def test_an_engine_that_hangs_is_ended_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    pool = world.pool(1, restarts=1)
    pool.batch_timeout_s = 0.0
    hangs = iter([True])
    world.order = lambda busy: None if next(hangs, False) else busy[0]
    assert dict(pool.run(pieces(2))) == {0: [1], 1: [2]}
    assert "did not answer within engines.batch_timeout_s=0 s; raise it, or lower answers.batch_size" in caplog.text
    assert [e.is_alive for e in world.made] == [False, True]


def test_results_in_order() -> None:
    results = iter([(4, "d"), (2, "b"), (3, "c"), (7, "g")])
    ordered = in_order(results, [2, 3, 4, 7])
    assert next(ordered) == (2, "b")
    assert next(results) == (3, "c"), "a result is handed on as soon as those before it are there"
    assert list(in_order([(1, "b"), (0, "a")], [0, 1])) == [(0, "a"), (1, "b")]


def test_seeds_are_told_apart_and_go_to_the_engine() -> None:
    seeds = {seed_of(purpose, seed, n) for purpose in ("answers/0", "answers/1") for seed in (0, 1) for n in range(50)}
    assert len(seeds) == 200
    assert seed_of("answers/0", 0, 7) == seed_of("answers/0", 0, 7) < 2**48
    asked = sampling_params(Request([1], 0.8, 5, (9,), seed=11), [STOP])
    assert asked["sampling_seed"] == 11
    assert asked["stop_token_ids"] == [STOP, 9]
    assert "sampling_seed" not in sampling_params(Request([1], 0.0, 5), [STOP])
