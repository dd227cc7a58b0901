"""When another version is put in, refused and rolled back, and what MLflow is told of it."""

import asyncio
import errno
import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from ray.exceptions import RayActorError
from rollover_cases import ALIAS, METRICS, ONE, Ended, FakeStage, World, follow_again, traffic
from versions import MODEL, answers, champion

from rayspec.serving import cluster, kinds
from rayspec.serving.alias import followed, pinned_source
from rayspec.serving.board import Board
from rayspec.serving.canary import Answer, tau
from rayspec.serving.canary_actor import outages_postpone
from rayspec.serving.champion import Champion
from rayspec.serving.cluster import EXPERIMENT, RayStage, _events
from rayspec.serving.deployed import to_keep
from rayspec.serving.events import FILE, Event, Standing
from rayspec.serving.figures import Totals, WatchBounds, pooled, read_totals
from rayspec.serving.process import ServerFailed, free_port
from rayspec.serving.replica import Replica
from rayspec.serving.rollover import Postponed, RolloverSettings
from rayspec.serving.scale import Scale
from rayspec.serving.start import Start
from rayspec.tracking import TrackingError, connect


def test_a_good_version_is_put_in(world: World, tmp_path: Path) -> None:
    world.rollover.poll()
    assert world.told() == []
    world.move("2")
    world.rollover.poll()
    world.rollover.poll()
    assert world.told() == [(k, "2") for k in (kinds.FOUND, kinds.CANARY_PASSED, kinds.SWAPPED, kinds.KEPT)]
    assert world.stage.put == ["2"]
    assert world.tags("2")["rollover"] == "kept"
    assert "too few requests" in world.tags("2")["rollover.reason"]
    world.events.end()
    run = world.client.get_run(world.tags("2")["rollover.run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.metrics["canary_tau"] == pytest.approx(tau(answers(1.5)))
    lines = Path(world.client.download_artifacts(run.info.run_id, FILE, str(tmp_path))).read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["found", "canary_passed", "swapped", "kept"]
    assert all(event["reason"] for event in events)
    assert events[1]["reason"] == "16 of 16 answers are the running version's; tau on the canary prompts is 2.494"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.checks.update({"2": ValueError("model.safetensors differ")}), "model.safetensors differ"),
        (lambda s: s.canaries.update({"2": ValueError("the canary did not serve: NaN")}), "did not serve: NaN"),
        (lambda s: s.canaries.update({"2": answers(0.0)}), "less than 50% of the accepted drafts"),
    ],
)
def test_a_refused_version_takes_no_traffic_and_is_not_tried_again(
    world: World, damage: Callable[[FakeStage], None], message: str
) -> None:
    damage(world.stage)
    world.move("2")
    for _ in range(3):
        world.rollover.poll()
    assert world.told() == [(kinds.FOUND, "2"), (kinds.REFUSED, "2")]
    assert message in world.tags("2")["rollover.reason"]
    assert (world.stage.put, world.stage.asked) == ([], ["2"])
    world.move("1")
    world.rollover.poll()
    world.move("2")  # the alias has moved: somebody wants it again
    world.rollover.poll()
    assert world.stage.asked == ["2", "2"]
    world.move("3")
    world.rollover.poll()
    assert world.stage.put == ["3"]


def test_what_lies_outside_of_a_version_is_tried_again(world: World) -> None:
    world.stage.running = Postponed("the running version did not answer")
    world.move("2")
    for _ in range(3):
        world.rollover.poll()
    assert world.told() == [(kinds.FOUND, "2"), (kinds.POSTPONED, "2")]
    world.stage.running = answers(1.5)
    world.rollover.poll()
    assert world.stage.put == ["2"]


def test_what_is_postponed_again_and_again_is_tried_ever_more_rarely(world: World) -> None:
    """Each try costs a canary, and perhaps a start of all replicas. Another version is tried at once."""
    names = iter(range(100))

    class Full:
        def pop(self) -> Exception:
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/home/champions/.a-{next(names)}")

    full: Any = Full()
    world.stage.broken["2"] = full
    world.move("2")
    tried = []
    for look in range(100):
        before = len(world.stage.asked)
        world.rollover.poll()
        tried += [look] * (len(world.stage.asked) - before)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 95]
    events = [event for event, _ in world.told()]
    assert (events[0], events.count(kinds.POSTPONED)) == (kinds.FOUND, 1), "said once, whatever the file's name"
    world.move("1")
    world.rollover.poll()
    world.move("2")  # somebody wants it again
    before = len(world.stage.asked)
    world.rollover.poll()
    assert world.stage.asked[before:] == ["2"]
    world.move("3")
    world.rollover.poll()
    assert world.stage.put == ["3"]


def test_a_version_that_is_worse_under_traffic_is_rolled_back(world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, accepted=0.5)}
    world.pass_time()
    world.move("2")
    for _ in range(3):
        world.rollover.poll()
    assert world.stage.put == ["2", "1"]
    assert [e for e, _ in world.told()] == [kinds.FOUND, kinds.CANARY_PASSED, kinds.SWAPPED, kinds.ROLLED_BACK]
    assert "40% below the 2.500 of the version before" in world.tags("2")["rollover.reason"]
    assert world.rollover.version == "1"
    run = world.run_of(world.events)
    assert run.data.metrics["watch_tau"] == pytest.approx(1.5)


def test_a_version_that_is_kept_for_want_of_readings_before_says_so(world: World) -> None:
    """The alias moves right after the start: what lies between two readings of the version before proves nothing."""

    def uneven(now: float) -> Totals:  # ranks of figures that are all alike prove what they should not
        return traffic(now, token_s=1.0 + 1e-4 * math.sin(now))

    world.stage.live = {champion("1").name: traffic, champion("2").name: uneven}
    world.rollover.poll()
    world.stage.now += 60
    world.move("2")
    world.rollover.poll()
    assert world.stage.put == ["2"]
    reason = world.tags("2")["rollover.reason"]
    assert "a token takes 1000.1 ms under traffic" in reason
    assert reason.endswith("by so few readings of the counters, or such uneven ones, chance may explain it")


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        (
            lambda now: Totals(deaths=now // 60),
            "3 of its servers died under traffic, where 0 of the",
        ),
        (lambda now: Totals(asked=now), "none of 300 requests got a token, where the version before answered 270"),
        (
            lambda now: replace(traffic(now), ttft_s=0.25 * now),
            "the first token takes 250.0 ms under traffic, 150%",
        ),
    ],
)
def test_a_version_that_does_not_answer_is_rolled_back(
    world: World, live: Callable[[float], Totals], reason: str
) -> None:
    begin: list[float] = []

    def new(now: float) -> Totals:
        begin[:] = begin or [now]
        return live(now - begin[0])

    world.stage.live = {champion("1").name: traffic, champion("2").name: new}
    world.pass_time()
    world.move("2")
    world.rollover.poll()
    assert world.stage.put == ["2", "1"]
    assert reason in world.tags("2")["rollover.reason"]


def test_what_is_compared_is_traffic_alone(world: World) -> None:
    """Neither what the canary asks of the running version nor what the new one answered when it ran before."""
    asked = [0.0]
    world.stage.live = {
        champion("1").name: lambda now: traffic(now) + traffic(asked[0], accepted=4.0),
        champion("2").name: lambda now: traffic(1e6, accepted=0.1) + traffic(now),
    }
    world.pass_time()

    def running_answers() -> list[Answer]:
        asked[0] = 1e4
        return answers(1.5)

    world.stage.running_answers = running_answers  # type: ignore[method-assign]
    world.move("2")
    world.rollover.poll()
    assert world.told()[-1] == (kinds.KEPT, "2")
    metrics = world.client.get_run(world.tags("2")["rollover.run_id"]).data.metrics
    assert (metrics["watch_tau"], metrics["watch_tau_before"]) == (pytest.approx(2.5), pytest.approx(2.5))
    assert (metrics["watch_requests"], metrics["watch_requests_before"]) == (300, 270)


def test_what_is_remembered_goes_back_to_enough_requests(world: World) -> None:
    world.stage.live = {champion("1").name: lambda now: traffic(min(now, 60) + max(0, now - 3600) / 60)}
    world.pass_time(60)
    assert len(world.rollover._seen) < 20, "an hour without requests is one part"
    world.pass_time(10)
    assert pooled(world.rollover._recent()).requests >= WatchBounds().min_requests
    world.pass_time(30)
    assert 20 <= pooled(world.rollover._recent()).requests < 30


def test_a_roll_back_that_fails_is_said_and_serving_goes_on(world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}
    world.pass_time()
    world.stage.broken["1"] = [ValueError("the replicas did not start")]
    world.move("2")
    for _ in range(2):
        world.rollover.poll()
    assert world.tags("2")["rollover"] == kinds.ROLLBACK_FAILED
    assert world.stage.put == ["2"], "a version whose replicas do not start is not tried again and again"
    assert world.rollover.version == "2"
    standing = world.standing()
    assert standing is not None
    assert (standing.is_refused, standing.kept, standing.tried) == (True, "1", "2")
    assert standing.after(Event(event=kinds.FOUND, model=MODEL, version="1")) == Standing(kept="1")


@pytest.mark.parametrize(
    "error", [RayActorError(), FileNotFoundError(2, "No such file", "serving.json"), Postponed("no room")]
)
def test_a_roll_back_that_nobody_thought_of_ends_no_serving_and_is_made_later(error: Exception, world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}
    world.pass_time()
    world.stage.broken["1"] = [error, error]
    world.move("2")
    for version in ("2", "2", "1", "1"):
        world.rollover.poll()
        assert world.rollover.version == version
        standing = world.standing()
        assert standing is not None
        assert (standing.is_refused, standing.kept, standing.tried) == (True, "1", "2")
    assert world.stage.put == ["2", "1"]
    assert [kind for kind, _ in world.told()][2:] == [kinds.SWAPPED, kinds.ROLLBACK_FAILED, kinds.ROLLED_BACK]
    assert "a token takes" in world.tags("2")["rollover.reason"]


def test_another_version_takes_the_place_of_one_that_was_not_rolled_back(world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}
    world.pass_time()
    world.stage.broken["1"] = [RayActorError(), RayActorError()]
    world.move("2")
    world.rollover.poll()
    world.move("3")
    for _ in range(3):
        world.rollover.poll()
    assert world.stage.put == ["2", "3"]
    assert world.rollover.version == "3"


@pytest.mark.parametrize("alias", ["1", "2", "3"])
def test_a_roll_back_that_is_owed_is_made_first_whatever_the_alias_means(alias: str, world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}
    world.pass_time()
    world.stage.broken["1"] = [RayActorError()]
    world.move("2")
    world.rollover.poll()
    world.move(alias)
    world.rollover.poll()
    assert world.stage.put == ["2", "1", *(["3"] if alias == "3" else [])]
    assert world.stage.asked == ["2", *(["3"] if alias == "3" else [])], "it goes back in without a canary"


def test_an_alias_that_is_gone_changes_nothing_and_is_said_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    version = world.client.get_model_version_by_alias(MODEL, "champion").version
    world.client.delete_registered_model_alias(MODEL, "champion")
    for _ in range(3):
        world.rollover.poll()
    assert world.told() == []
    assert caplog.text.count(f"MLflow does not say what {MODEL}@champion means: ") == 1
    world.client.set_registered_model_alias(MODEL, "champion", version)
    world.rollover.poll()
    world.client.delete_registered_model_alias(MODEL, "champion")
    world.rollover.poll()
    assert caplog.text.count("MLflow does not say") == 2


def test_a_store_that_is_away_postpones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(MlflowClient, "get_model_version_by_alias", away)
    monkeypatch.setattr(MlflowClient, "set_model_version_tag", away)
    world.rollover.poll()
    assert world.told() == [(kinds.POSTPONED, "1")]
    monkeypatch.undo()
    world.events.write()
    assert world.tags("1")["rollover"] == "postponed"


def test_only_an_alias_is_followed(world: World) -> None:
    assert followed("models:/a@champion") == ("a", "champion")
    for source in ("models:/a/1", "folder", "0" * 32):
        with pytest.raises(ValueError, match="--follow needs models:/NAME@ALIAS"):
            followed(source)
    assert pinned_source(f"models:/{MODEL}@champion", world.client) == f"models:/{MODEL}/1"
    assert pinned_source("models:/nobody@champion", world.client) == "models:/nobody@champion"
    assert pinned_source("folder", world.client) == "folder"


def test_settings_that_make_no_sense() -> None:
    for seconds in (0, -1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="--poll-seconds must be above 0 and at most 86400"):
            RolloverSettings(poll_s=seconds)
    for seconds in (-1, float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match=r"--watch-seconds must be in 0\.\.86400"):
            RolloverSettings(watch_s=seconds)


def test_what_is_under_traffic_stays_until_the_next_has_passed_its_canary(caplog: pytest.LogCaptureFixture) -> None:
    """Of a command that takes over what a killed one left, while the alias has moved on."""
    new, old = champion("2"), champion("1")
    sources = (f"models:/{MODEL}/2", f"models:/{MODEL}/1")
    assert to_keep(new, *sources, find=lambda source: {sources[1]: old}[source]) == (old, sources[1])
    assert to_keep(new, sources[0], sources[0], find=lambda source: old) == (new, sources[0])
    assert to_keep(new, *sources, find=None) == (new, sources[0])

    def gone(source: str) -> Champion:
        raise ValueError("its files are gone")

    assert to_keep(new, *sources, find=gone) == (new, sources[0])
    assert "may not be served any more: its files are gone" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConnectionError("reset by peer")])
def test_a_check_that_breaks_off_ends_no_serving(error: OSError, world: World) -> None:
    """A full disk while a version is fetched, say, or a store of artifacts that breaks off."""
    world.stage.checks["2"] = error
    world.move("2")
    for _ in range(2):
        world.rollover.poll()
    assert world.told() == [(kinds.FOUND, "2"), (kinds.POSTPONED, "2")]
    del world.stage.checks["2"]
    for _ in range(2):  # the first look leaves it out
        world.rollover.poll()
    assert world.stage.put == ["2"]


def test_an_error_of_any_library_ends_no_serving(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a store of artifacts while an event is written, say, and of a poll at large."""

    class BotoError(Exception):
        pass

    def away(*_: object) -> None:
        raise BotoError("no bucket")

    def end(seconds: float) -> None:
        raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_text", away)
        world.move("2")
        world.rollover.poll()
    assert world.told()[-1] == (kinds.KEPT, "2")
    assert "MLflow took no event of the roll-over" in caplog.text
    monkeypatch.setattr(world.rollover, "poll", away)
    with pytest.raises(Ended):
        world.rollover.run(end)
    assert "the alias was not followed this time" in caplog.text


def test_what_nobody_thought_of_ends_no_serving(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_in(*_: object) -> None:
        raise RayActorError

    world.move("2")
    with monkeypatch.context() as broken:
        broken.setattr(world.stage, "put_in", put_in)
        for _ in range(2):
            world.rollover.poll()
    tried = [(kinds.CANARY_PASSED, "2"), (kinds.POSTPONED, "2"), (kinds.CANARY_PASSED, "2")]  # a reason is told once
    assert world.told() == [(kinds.FOUND, "2"), *tried]
    assert world.rollover.version == "1"
    for _ in range(2):  # the first look leaves it out
        world.rollover.poll()
    assert world.stage.put == ["2"]


def test_a_replica_has_the_gpus_of_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(cluster, "node_gpus", lambda: [8])
    monkeypatch.setattr(cluster, "canary_on_ray", lambda version, scale: asked.append(("canary", scale.gpus)))
    monkeypatch.setattr(cluster, "put_in", lambda version, scale, board: asked.append(("put in", scale.gpus)))
    nothing: Any = None
    live: Any = SimpleNamespace(folder="m-1")
    serving: Any = SimpleNamespace(
        follows_policy=False, more=(), scale=Scale(gpus=1.0), version=lambda champion, source: source
    )
    wide = champion("2")
    wide = replace(wide, record=replace(wide.record, flags={**wide.record.flags, "tp_size": 2}))
    stage = RayStage(MODEL, nothing, serving, nothing, live)
    stage.canary(wide, "2")
    stage.put_in(wide, "2")
    assert asked == [("canary", 2.0), ("put in", 2.0)]


def test_a_replica_has_the_gpus_of_the_ranks_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "node_gpus", lambda: [8.0])
    assert cluster._with_resources(Scale(), champion("2"), ("--tp-size", "2")).gpus == 2
    assert cluster._with_resources(Scale(), champion("2"), ()).gpus == 1


@pytest.mark.parametrize(
    ("gpus", "scale", "fits"),
    [
        ([1.0], Scale(minimum=2, maximum=2, gpus=1), False),
        ([0.0, 1.0, 1.0], Scale(minimum=2, maximum=4, gpus=1), True),
        ([3.0, 1.0], Scale(minimum=2, maximum=2, gpus=2), False),
        ([], Scale(minimum=2, maximum=2), True),
    ],
    ids=["one_gpu", "one_each", "in_pieces", "no_gpus"],
)
def test_replicas_that_the_gpus_do_not_hold_are_refused_at_once(
    gpus: list[float], scale: Scale, fits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a cluster of others, which may grow, it is a warning."""
    monkeypatch.setattr(cluster, "node_gpus", lambda: gpus)
    with nullcontext() if fits else pytest.raises(ValueError, match=r"which hold 1; lower --replicas"):
        cluster._check_room(scale, may_grow=False)
    cluster._check_room(scale, may_grow=True)
    assert ("which hold 1; nothing listens until it has grown" in caplog.text) == (not fits)


def test_a_version_goes_back_in_though_its_files_are_gone_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes fetch it from MLflow again."""
    put: list[Any] = []
    monkeypatch.setattr(cluster, "node_gpus", lambda: [])
    monkeypatch.setattr(cluster, "put_in", lambda version, scale, board: put.append(version))
    read: list[str] = []

    def version(champion: Champion, source: str) -> SimpleNamespace:
        if source in read:
            raise FileNotFoundError(2, "No such file or directory", "serving.json")
        read.append(source)
        return SimpleNamespace(source=source, folder=champion.folder.name)

    nothing: Any = None
    serving: Any = SimpleNamespace(follows_policy=False, more=(), scale=Scale(), version=version)
    of = {number: replace(champion(number), folder=Path(f"{MODEL}-{number}")) for number in "12"}
    live: Any = version(of["1"], ONE)
    stage = RayStage(MODEL, nothing, serving, nothing, live)
    for number in "2121":
        stage.put_in(of[number], number)
    assert [v.source.rpartition("/")[2] for v in put] == ["2", "1", "2", "1"]


def test_an_outage_beside_a_canary_says_nothing_of_the_version() -> None:
    with pytest.raises(Postponed, match="No space left"), outages_postpone():
        raise OSError(28, "No space left on device")
    with pytest.raises(Postponed, match="does not answer"), outages_postpone():
        connect(f"http://127.0.0.1:{free_port()}", create=False)
    for error in (TrackingError("no such version"), ValueError("a random head")):
        with pytest.raises(type(error)), outages_postpone():
            raise error


def test_events_wait_for_a_store_that_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The replicas are up by then, and go on."""
    waits: list[int] = []

    def away(*_: object, **__: object) -> None:
        raise MlflowException("no such host")

    monkeypatch.setattr(MlflowClient, "get_model_version", away)

    def wait() -> None:
        waits.append(1)
        if len(waits) == 2:
            monkeypatch.undo()
            monkeypatch.setenv("MLFLOW_TRACKING_URI", world.client.tracking_uri)

    events = _events(world.client, ALIAS, "1", Standing(kept="1"), wait)
    assert (len(waits), world.run_of(events).info.status) == (2, "RUNNING")
    assert "MLflow takes no events of a roll-over yet (no such host)" in caplog.text


def test_a_board_that_is_gone_is_no_count_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: object, **__: object) -> None:
        raise RayActorError

    monkeypatch.setattr(cluster.ray, "get", get)
    board: Any = SimpleNamespace(totals=SimpleNamespace(remote=lambda name: None))
    serving: Any = SimpleNamespace(follows_policy=False, more=(), scale=None)
    nothing: Any = None
    live: Any = SimpleNamespace(folder="m-1")
    assert RayStage(MODEL, nothing, serving, board, live).totals(champion("1")) is None


def test_replicas_of_one_process_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers many have the same."""
    board = Board()
    told: Any = SimpleNamespace(put=SimpleNamespace(remote=board.put))
    version: Any = SimpleNamespace(name="a", tries_first=False)
    asked = httpx.Request("GET", "http://x/metrics")
    said = cycle([httpx.Response(200, text=METRICS, request=asked), httpx.Response(503, request=asked)])
    server = SimpleNamespace(address="http://x", is_alive=True)
    monkeypatch.setattr("rayspec.serving.replica.start_server", lambda _: (None, server))
    monkeypatch.setattr("rayspec.serving.replica.httpx.get", lambda *_, **__: next(said))
    monkeypatch.setattr(Replica, "_watch", lambda _: None)
    for _ in range(2):
        replica = Replica(version, told)
        for _ in range(2):  # the second answer, of a server that is ill, tells nothing
            replica._count()
            replica._tell()
    assert board.totals("a") == Totals(**{**asdict(read_totals(METRICS) + read_totals(METRICS)), "deaths": 0})


class Down(httpx.AsyncBaseTransport):
    """The way to a server whose health is bad, until `is_up`."""

    is_up = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if self.is_up else 503)


def test_a_replica_tells_of_its_servers_death(monkeypatch: pytest.MonkeyPatch) -> None:
    board, server = Board(), SimpleNamespace(address="http://x", is_alive=True, stop=lambda _: None)
    monkeypatch.setattr("rayspec.serving.replica.start_server", lambda _: (None, server))
    monkeypatch.setattr(Replica, "_watch", lambda _: None)
    told: Any = SimpleNamespace(put=SimpleNamespace(remote=board.put))
    version: Any = SimpleNamespace(name="a", tries_first=False)

    def deaths(replica: Replica) -> float:
        replica._tell()
        return board.totals("a").deaths

    replica, way = Replica(version, told), Down()
    replica._client = httpx.AsyncClient(base_url="http://x", transport=way)
    for failed in (0, 0, 1):
        with pytest.raises(ServerFailed, match="503"):
            asyncio.run(replica.check_health())
        assert deaths(replica) == failed
    with pytest.raises(ServerFailed, match="SGLang's /metrics answered 503"):
        asyncio.run(replica.metrics())
    way.is_up = True
    assert asyncio.run(replica.metrics()) == (replica._name, "a", "")
    asyncio.run(replica.check_health())
    assert deaths(replica) == 0
    server.is_alive = False
    assert deaths(replica) == 1
    stopped = Replica(version, told)
    stopped.stop()
    assert deaths(stopped) == 1, "the first one's alone"


def test_an_alias_is_followed_without_a_run_that_mlflow_refuses(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def never() -> None:
        pytest.fail("it is not waited for")

    world.client.delete_experiment(world.client.get_experiment_by_name(EXPERIMENT).experiment_id)
    events = _events(world.client, ALIAS, "1", Standing(kept="1"), never)
    assert events.run is None
    assert "must be in the 'active' state" in caplog.text
    world.move("2")
    follow_again(world, Start(champion=champion("1"), source=ONE), monkeypatch)
    assert (world.stage.put, world.tags("2")["rollover"]) == (["2"], "kept")


def test_a_login_that_may_not_write_follows_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MlflowException("Permission denied", PERMISSION_DENIED)

    world.move("2")
    for name in ("create_run", "set_model_version_tag", "set_registered_model_tag"):
        monkeypatch.setattr(MlflowClient, name, refuse)
    follow_again(world, Start(champion=champion("1"), source=ONE), monkeypatch)
    assert world.stage.put == ["2"]
    assert "let this login write" in caplog.text


def test_events_of_a_version_that_was_deleted_hold_up_no_others(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise MlflowException("no such host")

    monkeypatch.setattr(MlflowClient, "set_model_version_tag", away)
    world.events.record(kinds.REFUSED, "2", "its files are gone")
    monkeypatch.undo()
    world.client.delete_model_version(MODEL, "2")
    world.events.record(kinds.FOUND, "3")
    assert world.tags("3")["rollover"] == "found"
    assert "MLflow refuses the event 'refused' as tags of version 2, which is left out" in caplog.text
    run = world.run_of(world.events)
    lines = Path(world.client.download_artifacts(run.info.run_id, FILE, str(tmp_path))).read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["refused", "found"]
