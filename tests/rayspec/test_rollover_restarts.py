"""What a command knows, when it is started again, of the versions before."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rollover_cases import ALIAS, ONE, SOURCE, TWO, Ended, World, be_poor, be_slow, find, follow_again
from versions import MODEL, champion

from rayspec.serving import kinds
from rayspec.serving.champion import Champion
from rayspec.serving.cluster import Following, _finder
from rayspec.serving.deployed import to_keep
from rayspec.serving.events import Standing, standing_tag
from rayspec.serving.rollover import Postponed, RolloverSettings
from rayspec.serving.start import Start, find_start


@pytest.mark.parametrize(
    ("damage", "event", "message"),
    [
        (be_slow, "rolled_back", r"means version 2, and version 2 was rolled back \(20.*: a token takes .* ms under"),
        (be_poor, "refused", r"means version 2, and version 2 was refused \(20.*: .*less than 50% of the accepted"),
    ],
)
def test_what_was_refused_takes_no_traffic_after_a_restart(
    damage: Callable[[World], None], event: str, message: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(world)
    world.pass_time()
    world.move("2")
    world.rollover.poll()
    assert world.tags("2")["rollover"] == event
    for _ in range(2):
        start = find_start(SOURCE, world.client, find, follows=True)
        assert (start.source, start.champion) == (ONE, champion("1"))
        world.stage.put.clear()
        assert follow_again(world, start, monkeypatch) == [kinds.STARTED]
        assert world.stage.put == []
        assert world.tags("2")["rollover"] == event, "the next start knows it, too"
    with pytest.raises(ValueError, match=message) as refusal:
        find_start(SOURCE, world.client, find, follows=False)
    assert f"serve it by its number ({TWO}, without --follow), or delete the model's tag rollover.champion" in str(
        refusal.value
    )
    assert find_start(TWO, world.client, find, follows=False).source == TWO


def test_a_moved_alias_ends_what_was_refused(world: World) -> None:
    be_poor(world)
    world.move("2")
    world.rollover.poll()
    world.move("3")
    assert find_start(SOURCE, world.client, find, follows=False).champion == champion("3")
    world.move("1")
    world.rollover.poll()
    world.move("2")
    assert find_start(SOURCE, world.client, find, follows=True) == Start(champion=champion("2"), source=TWO)


def test_a_refused_version_whose_predecessor_is_gone_is_not_served(world: World) -> None:
    def gone(source: str) -> Champion:
        raise ValueError("its files are gone")

    be_poor(world)
    world.move("2")
    world.rollover.poll()
    with pytest.raises(ValueError, match="version 1, which was there before, cannot be served: its files are gone"):
        find_start(SOURCE, world.client, gone, follows=True)


def test_a_version_that_was_not_watched_to_the_end_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that is killed as it watches: its version takes the traffic that is left on a cluster of others."""

    def killed(seconds: float) -> None:
        raise Ended

    world.rollover._sleep = killed
    world.move("2")
    with pytest.raises(Ended):
        world.rollover.poll()
    assert world.tags("2")["rollover"] == "swapped"
    start = find_start(SOURCE, world.client, find, follows=True)
    assert start.source == ONE
    following = Following(client=world.client, alias=ALIAS, settings=RolloverSettings(), standing=start.standing)
    kept = to_keep(start.champion, start.source, TWO, _finder(following, SimpleNamespace()))  # type: ignore[arg-type]
    assert kept == (champion("1"), ONE)
    assert "version 2 was put in, but not watched to the end" in caplog.text
    world.stage.canaries["2"] = Postponed("there was no room")
    follow_again(world, start, monkeypatch)
    start = find_start(SOURCE, world.client, find, follows=True)
    assert start.source == ONE, "it is not forgotten by a start that did not get as far"
    assert find_start(SOURCE, world.client, find, follows=False).source == TWO
    del world.stage.canaries["2"]
    world.stage.put.clear()
    follow_again(world, start, monkeypatch)
    assert (world.stage.put, world.tags("2")["rollover"]) == (["2"], "kept")
    assert world.standing() == Standing(kept="2")
    assert find_start(SOURCE, world.client, find, follows=True) == Start(champion=champion("2"), source=TWO)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "[]",
        "{",
        "[" * 5000,
        '{"kept": 1}',
        '{"kept": "../1", "tried": "2", "event": "refused"}',
        '{"kept": "1", "tried": "2", "event": "x"}',
        '{"kept": "1", "tried": "2", "event": "refused", "more": ""}',
    ],
)
def test_a_tag_that_nobody_can_read_is_left_out(value: str, world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.client.set_registered_model_tag(MODEL, standing_tag("champion"), value)
    assert find_start(SOURCE, world.client, find, follows=True) == Start(champion=champion("1"), source=ONE)
    assert f"the tag rollover.champion of the model {MODEL} is left out" in caplog.text
