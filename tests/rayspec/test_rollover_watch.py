"""The watch of a new version while its alias moves on or back, and what a third version meets."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from mlflow import MlflowClient
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from ray.exceptions import RayActorError
from rollover_cases import World, traffic
from versions import MODEL, champion

from rayspec.serving import kinds
from rayspec.serving.events import WATCH_TIMEOUT_S, Event, Standing
from rayspec.serving.figures import WatchBounds
from rayspec.serving.rollover import Postponed, RolloverSettings


def watch_until(world: World, seconds: float, do: Callable[[], None]) -> None:
    """Have something happen while a version is watched."""

    def sleep(step: float) -> None:
        world.stage.now += step
        if world.stage.now >= seconds:
            do()

    world.rollover._sleep = sleep


def test_an_alias_that_moves_on_ends_the_watch(world: World) -> None:
    watch_until(world, 20, lambda: world.move("3"))
    world.move("2")
    world.rollover.poll()
    assert world.stage.now == 20
    assert world.told()[-2:] == [(kinds.SWAPPED, "2"), (kinds.WATCH_ENDED, "2")]
    assert world.tags("2")["rollover.reason"] == "the alias means version 3 now"
    world.rollover.poll()
    assert world.stage.put == ["2", "3"]
    assert world.told()[-1] == (kinds.KEPT, "3")


@pytest.mark.parametrize(
    ("third", "tried"), [(ValueError("NaN"), kinds.REFUSED), (Postponed("no room"), kinds.POSTPONED)]
)
@pytest.mark.parametrize(("token_s", "end"), [(0.01, kinds.KEPT), (1.0, kinds.ROLLED_BACK)])
def test_a_version_is_watched_to_the_end_where_a_third_does_not_take_its_place(
    third: Exception, tried: str, token_s: float, end: str, world: World
) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=token_s)}
    world.pass_time()
    world.stage.canaries["3"] = third
    watch_until(world, world.stage.now + 1, lambda: world.move("3"))
    world.move("2")
    world.rollover._settings = RolloverSettings(watch=WatchBounds(min_requests=10**6))  # nothing is found meanwhile
    world.rollover.poll()
    assert world.told()[-1] == (kinds.WATCH_ENDED, "2")
    world.rollover._settings = RolloverSettings()
    world.rollover.poll()
    assert [t for t in world.told() if t[1] == "3"] == [(kinds.FOUND, "3"), (tried, "3")]
    assert world.told()[-1] == (end, "2")
    assert world.rollover.version == ("2" if end == kinds.KEPT else "1")


def test_after_an_unfinished_watch_the_version_that_was_kept_is_what_counts(world: World) -> None:
    """A third version is held against it, and it is what comes back."""
    slow = {name: lambda now: traffic(now, token_s=1.0) for name in (champion("2").name, champion("3").name)}
    world.stage.live = {champion("1").name: traffic, **slow}
    world.pass_time()
    watch_until(world, world.stage.now + 1, lambda: world.move("3"))
    world.rollover._settings = RolloverSettings(watch=WatchBounds(min_requests=10**6))
    world.move("2")
    world.rollover.poll()
    world.rollover._settings = RolloverSettings()
    world.rollover.poll()
    assert world.told()[-2:] == [(kinds.SWAPPED, "3"), (kinds.ROLLED_BACK, "3")]
    assert world.stage.put == ["2", "3", "1"]


def test_an_alias_that_moves_back_after_a_third_was_postponed_brings_the_old_version(world: World) -> None:
    world.stage.canaries["3"] = Postponed("no room")
    watch_until(world, 20, lambda: world.move("3"))
    world.move("2")
    world.rollover.poll()
    world.rollover._sleep = lambda seconds: None
    world.move("1")
    world.rollover.poll()
    assert (world.stage.put, world.rollover.version) == (["2", "1"], "1")


@pytest.mark.parametrize(("third", "is_tried"), [(ValueError("NaN"), False), (Postponed("no room"), True)])
def test_rolling_a_second_version_back_forgets_nothing_of_a_third(
    third: Exception, is_tried: bool, world: World
) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}
    world.pass_time()
    world.stage.canaries["3"] = third
    watch_until(world, world.stage.now + 1, lambda: world.move("3"))
    world.move("2")
    world.rollover._settings = RolloverSettings(watch=WatchBounds(min_requests=10**6))
    world.rollover.poll()
    world.rollover._settings = RolloverSettings()
    world.rollover.poll()
    assert world.told()[-1] == (kinds.ROLLED_BACK, "2")
    standing = world.standing()
    assert standing is not None
    assert (standing.kept, standing.tried) == ("1", "3")
    for _ in range(4):
        world.rollover.poll()
    assert world.stage.asked.count("3") == (3 if is_tried else 1), "a refused one is not tried until the alias moves"
    assert (world.rollover.version, world.standing()) == ("1", standing)


def test_a_third_version_is_held_against_the_one_that_a_roll_back_owes(world: World) -> None:
    slow = {name: lambda now: traffic(now, token_s=1.0) for name in (champion("2").name, champion("3").name)}
    world.stage.live = {champion("1").name: traffic, **slow}
    world.pass_time()
    world.stage.broken["1"] = [RayActorError(), RayActorError()]
    world.move("2")
    world.rollover.poll()
    assert world.told()[-1] == (kinds.ROLLBACK_FAILED, "2")
    world.move("3")
    world.rollover.poll()
    assert world.stage.put == ["2", "3", "1"]
    assert world.rollover.version == "1"


def test_what_is_kept_after_another_was_tried_forgets_no_refusal() -> None:
    refused = Standing(kept="1", tried="3", event=kinds.REFUSED, reason="NaN")
    assert refused.after(Event(event=kinds.ROLLED_BACK, model=MODEL, version="2")) == refused
    assert refused.after(Event(event=kinds.KEPT, model=MODEL, version="2")) == replace(refused, kept="2")
    assert refused.after(Event(event=kinds.KEPT, model=MODEL, version="3")) == Standing(kept="3")


def test_a_version_of_another_target_is_refused_by_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = champion("2")
    other = replace(other, record=replace(other.record, target="u", target_sha256="1"))
    monkeypatch.setattr(world.stage, "check", lambda version: other)
    world.move("2")
    world.rollover.poll()
    assert world.told()[-1] == (kinds.REFUSED, "2")
    assert world.tags("2")["rollover.reason"].startswith("it was measured on target u, and version 1, which is running")


def test_an_alias_that_moves_back_ends_the_watch_and_brings_the_old_version(world: World) -> None:
    watch_until(world, 20, lambda: world.move("1"))
    world.move("2")
    world.rollover.poll()
    assert (world.stage.now, world.stage.put, world.stage.asked) == (20, ["2", "1"], ["2"])
    assert world.tags("2")["rollover.reason"] == "the alias means version 1 again; version 1 is back"
    world.rollover.poll()
    assert world.standing() == Standing(kept="1")
    world.rollover._sleep = lambda seconds: None
    world.rollover._settings = RolloverSettings(watch_s=0)
    world.move("2")
    world.rollover.poll()
    assert world.told()[-1] == (kinds.KEPT, "2"), "it was not refused"


def test_a_store_that_is_away_ends_no_watch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        assert MLFLOW_HTTP_REQUEST_MAX_RETRIES.get() == 1, "the watch does not wait for minutes"
        raise MlflowException("no such host")

    watch_until(world, 20, lambda: monkeypatch.setattr(MlflowClient, "get_model_version_by_alias", away))
    world.move("2")
    world.rollover.poll()
    assert (world.stage.now, world.told()[-1]) == (300, (kinds.KEPT, "2"))


def test_events_keep_nobody_waiting_for_minutes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, write = [], MlflowClient.set_model_version_tag

    def noted(self: MlflowClient, *given: str) -> None:
        seen.append((MLFLOW_HTTP_REQUEST_MAX_RETRIES.get(), MLFLOW_HTTP_REQUEST_TIMEOUT.get()))
        write(self, *given)

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", noted)
    world.move("2")
    world.rollover.poll()
    assert set(seen) == {(1, WATCH_TIMEOUT_S)}
    assert not MLFLOW_HTTP_REQUEST_TIMEOUT.is_set()


@pytest.mark.parametrize("lost_at", [0, 100])
def test_a_version_that_could_not_be_watched_is_told_of(lost_at: float, world: World) -> None:
    def lose() -> None:
        world.stage.board_is_lost = True

    world.stage.live = {champion("1").name: traffic, champion("2").name: traffic}
    world.pass_time()
    if not lost_at:
        lose()
    watch_until(world, world.stage.now + lost_at, lose)
    world.move("2")
    world.rollover.poll()
    assert world.tags("2")["rollover"] == "kept"
    assert world.tags("2")["rollover.reason"].startswith("it could not be watched to the end: the counters")
