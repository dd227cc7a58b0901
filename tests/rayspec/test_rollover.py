"""When another version is put in, refused and rolled back, and what MLflow is told of it."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_MAX_RETRIES
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from ray.exceptions import RayActorError
from versions import MODEL, answers, champion
from volume import volume

from rayspec.serving import cluster
from rayspec.serving import events as kinds
from rayspec.serving.alias import MlflowRegistry, followed, pinned_source
from rayspec.serving.board import Board
from rayspec.serving.canary import Answer, tau
from rayspec.serving.champion import Champion
from rayspec.serving.cluster import EXPERIMENT, Following, RayStage, _events, _finder, follow
from rayspec.serving.deployed import to_keep
from rayspec.serving.events import FILE, Event, Events, Standing, read_standing, standing_tag
from rayspec.serving.figures import FALSE_ALARM, Totals, WatchBounds, pooled, read_totals, spent, window, worse
from rayspec.serving.replica import Replica
from rayspec.serving.rollover import Postponed, Rollover, RolloverSettings
from rayspec.serving.start import Start, find_start

ALIAS = (MODEL, "champion")
SOURCE, ONE, TWO = f"models:/{MODEL}@champion", f"models:/{MODEL}/1", f"models:/{MODEL}/2"
METRICS = """\
# TYPE rayspec_verified_requests_total counter
rayspec_verified_requests_total{draft_steps="4"} 100.0
rayspec_verified_requests_total{draft_steps="0"} 900.0
# TYPE rayspec_accepted_drafts_total counter
rayspec_accepted_drafts_total{position="1"} 90.0
rayspec_accepted_drafts_total{position="2"} 60.0
# TYPE rayspec_drafted_total counter
rayspec_drafted_total{position="1"} 100.0
rayspec_drafted_total{position="2"} 80.0
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{le="+Inf"} 10.0
sglang:e2e_request_latency_seconds_count 10.0
sglang:e2e_request_latency_seconds_sum 26.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="+Inf"} 10.0
sglang:time_to_first_token_seconds_count 10.0
sglang:time_to_first_token_seconds_sum 2.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{x="a"} 250.0
"""


def test_totals_of_a_servers_metrics() -> None:
    totals = read_totals(METRICS)
    assert totals.tau == pytest.approx(2.5)
    assert totals.tau_of_first == pytest.approx(1.9)
    assert totals.token_s == pytest.approx(0.1)
    assert read_totals("").tau is None
    assert (totals + totals - totals) == totals


def traffic(requests: float = 100, *, accepted: float = 1.5, token_s: float = 0.01, first: float = 0.6) -> Totals:
    tokens = 25 * requests
    return Totals(
        requests=requests,
        tokens=tokens,
        verified=10 * requests,
        accepted=10 * requests * accepted,
        drafted_first=10 * requests,
        accepted_first=10 * requests * first,
        ttft_s=0.1 * requests,
        e2e_s=0.1 * requests + (tokens - requests) * token_s,
    )


def parts(requests: float = 100, **figures: float) -> list[Totals]:
    return [traffic(requests / 10, **figures)] * 10


BEFORE = parts()
UNEVEN = [traffic(10, accepted=accepted) for accepted in (0.2, 2.6)] * 5  # tau as low as 1.1's below, but by chance


@pytest.mark.parametrize(
    ("now", "of_first_drafts", "message"),
    [
        (parts(), False, None),
        (parts(accepted=1.3), False, None),
        (parts(accepted=1.1), False, "tau under traffic is 2.100, 16% below the 2.500"),
        (parts(accepted=1.1), True, None),
        (parts(first=0.5), True, None),
        (parts(first=0.4), True, "tau of first drafts alone under traffic is 1.400, 13% below the 1.600"),
        (parts(first=0.4), False, None),
        ([*UNEVEN[:4], *parts(60, accepted=0.9)[:2]], False, None),
        (parts(token_s=0.014), False, None),
        (parts(token_s=0.016), True, "a token takes 16.0 ms under traffic, 60% more than the 10.0 ms"),
        (parts(19, accepted=0.1), False, None),
        ([traffic(accepted=0.1)], False, None),  # of one part nobody knows by how much it is chance
        ([], False, None),
    ],
)
def test_what_traffic_says(now: list[Totals], of_first_drafts: bool, message: str | None) -> None:
    found = worse(now, BEFORE, WatchBounds(), of_first_drafts=of_first_drafts, level=0.001)
    assert (found is None) == (message is None)
    assert message is None or (found is not None and message in found)


def drawn(rng: np.random.Generator, rate: float, looks: int, mean: float) -> list[Totals]:
    """What the counters say every 5 s of `rate` requests a second, of unlike acceptance."""
    marks = [Totals()]
    for count in rng.poisson(5 * rate, looks):
        accepted = (10 * np.clip(mean * rng.gamma(5, 0.2, count), 0, 4)).sum()
        marks.append(marks[-1] + dataclasses.replace(traffic(count), accepted=accepted))
    return marks


@pytest.mark.parametrize(("rate", "loss", "low", "high"), [(0.1, 0, 0, 0.015), (1, 0, 0, 0.015), (1, 0.3, 0.97, 1)])
def test_looking_again_and_again_gives_few_false_alarms(rate: float, loss: float, low: float, high: float) -> None:
    """Of versions that are watched for five minutes each. `loss`: share of the accepted drafts."""
    rng, alarms, versions = np.random.default_rng(7), 0, volume(200, 50)
    for _ in range(versions):
        before, marks = window(drawn(rng, rate, 60, 1.5)), drawn(rng, rate, 60, 1.5 * (1 - loss))
        alarms += any(
            worse(
                window(marks[: look + 1]),
                before,
                WatchBounds(),
                of_first_drafts=False,
                level=spent(look / 60) - spent((look - 1) / 60),
            )
            for look in range(1, 61)
        )
    assert low <= alarms / versions <= high


def test_looks_spend_no_more_than_all() -> None:
    assert sum(spent(n / 60) - spent((n - 1) / 60) for n in range(1, 61)) == pytest.approx(FALSE_ALARM)


def test_a_window_is_what_was_counted_between_two_times() -> None:
    marks = [traffic(n) for n in (5, 7, 20)]
    assert [part.requests for part in window(marks)] == [2, 13]
    assert pooled(window(marks)).tau == pytest.approx(2.5)
    assert pooled(window(marks[:1])) == Totals()


def test_a_board_adds_replicas_up() -> None:
    board = Board()
    for replica, count in (("x", 1.0), ("y", 2.0), ("x", 5.0)):
        board.put("a", replica, Totals(requests=count))
    board.put("b", "z", Totals(requests=100.0))
    assert board.totals("a").requests == 7
    assert board.totals("none") == Totals()


class FakeStage:
    """Versions by number: what `canary` gives, or the error that `check` raises."""

    follows_policy = False

    def __init__(self) -> None:
        self.canaries: dict[str, Any] = {}
        self.checks: dict[str, Exception] = {}
        self.running: Any = answers(1.5)
        self.now = 0.0
        self.live: dict[str, Callable[[float], Totals]] = {}  # by the time
        self.put: list[str] = []
        self.asked: list[str] = []
        self.board_is_lost = False

    def check(self, version: str) -> Champion:
        self.asked.append(version)
        if version in self.checks:
            raise self.checks[version]
        return champion(version)

    def canary(self, champion: Champion, version: str) -> list[Answer]:
        found = self.canaries.get(version, answers(1.5))
        if isinstance(found, Exception):
            raise found
        return found

    def running_answers(self) -> list[Answer]:
        if isinstance(self.running, Exception):
            raise self.running
        return self.running

    def put_in(self, champion: Champion, version: str) -> None:
        self.put.append(version)

    def totals(self, champion: Champion) -> Totals | None:
        if self.board_is_lost:
            return None
        return self.live.get(champion.name, lambda _: Totals())(self.now)


@dataclasses.dataclass
class World:
    client: MlflowClient
    stage: FakeStage
    events: Events
    rollover: Rollover

    def move(self, version: str) -> None:
        self.client.set_registered_model_alias(MODEL, "champion", version)

    def pass_time(self, minutes: int = 5) -> None:
        """With a poll twice a minute."""
        for _ in range(2 * minutes):
            self.stage.now += 30
            self.rollover.poll()

    def told(self) -> list[tuple[str, str]]:
        return [(e.event, e.version) for e in self.events.events]

    def tags(self, version: str) -> dict[str, str]:
        return dict(self.client.get_model_version(MODEL, version).tags)

    def run_of(self, events: Events) -> Run:
        assert events.run is not None
        return self.client.get_run(events.run.run_id)

    def standing(self) -> Standing | None:
        return read_standing(self.client, *ALIAS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real store with three versions, the first of which the alias means; a new one takes MLflow seconds."""
    folder = tmp_path_factory.mktemp("store")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_registered_model(MODEL)
    for _ in range(3):
        client.create_model_version(MODEL, folder.as_uri())
    client.set_registered_model_alias(MODEL, "champion", "1")
    return folder / "mlflow.db"


@pytest.fixture
def world(store: Path, tmp_path: Path) -> World:
    """A copy of the store, and the first version running; time passes only in sleeps."""
    shutil.copy(store, tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.create_experiment(EXPERIMENT, artifact_location=(tmp_path / "artifacts").as_uri())
    stage, events = FakeStage(), Events(client, ALIAS, experiment, Standing(kept="1"))

    def sleep(seconds: float) -> None:
        stage.now += seconds

    rollover = Rollover(
        champion("1"),
        "1",
        MlflowRegistry(client, *ALIAS),
        stage,
        events,
        RolloverSettings(),
        clock=lambda: stage.now,
        sleep=sleep,
    )
    return World(client, stage, events, rollover)


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
    assert [json.loads(line)["event"] for line in lines] == ["found", "canary_passed", "swapped", "kept"]


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

    def put_in(champion: Champion, version: str) -> None:
        if version == "1":
            raise ValueError("the replicas did not start")

    world.stage.put_in = put_in  # type: ignore[method-assign]
    world.move("2")
    world.rollover.poll()
    assert world.tags("2")["rollover"] == kinds.ROLLBACK_FAILED
    assert world.rollover.version == "2"
    standing = world.standing()
    assert standing is not None
    assert (standing.is_refused, standing.kept, standing.tried) == (True, "1", "2")
    assert standing.after(Event(event=kinds.FOUND, model=MODEL, version="1")) == Standing(kept="1")


def test_an_alias_that_is_gone_changes_nothing(world: World) -> None:
    world.client.delete_registered_model_alias(MODEL, "champion")
    world.rollover.poll()
    assert world.told() == []


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
    world.rollover.poll()
    assert world.stage.put == ["2"]


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


def find(source: str) -> Champion:
    return champion(source.rpartition("/")[2])


class Ended(Exception):
    """The command, in any way."""


def follow_again(world: World, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does once its replicas are up, until it has looked at the alias once."""

    def end(seconds: float) -> None:
        raise Ended

    serving: Any = SimpleNamespace(version=lambda *_: None)
    monkeypatch.setattr(cluster, "RayStage", lambda *_: world.stage)
    settings = RolloverSettings(watch_s=0)
    following = Following(client=world.client, alias=ALIAS, settings=settings, wait=end, standing=start.standing)
    with pytest.raises(Ended):
        follow(start.champion, start.source, serving, following, None)


def be_slow(world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}


def be_poor(world: World) -> None:
    world.stage.canaries["2"] = answers(0.0)


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
        follow_again(world, start, monkeypatch)
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


def test_a_board_that_is_gone_is_no_count_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*_: object, **__: object) -> None:
        raise RayActorError

    monkeypatch.setattr(cluster.ray, "get", get)
    board: Any = SimpleNamespace(totals=SimpleNamespace(remote=lambda name: None))
    serving: Any = SimpleNamespace(follows_policy=False)
    nothing: Any = None
    assert RayStage(MODEL, nothing, serving, board, nothing).totals(champion("1")) is None


def test_replicas_of_one_process_id_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """In containers many have the same."""
    board = Board()
    told: Any = SimpleNamespace(put=SimpleNamespace(remote=board.put))
    version: Any = SimpleNamespace(name="a")
    answer = SimpleNamespace(text=METRICS)
    monkeypatch.setattr("rayspec.serving.replica.start_server", lambda _: (None, SimpleNamespace(address="http://x")))
    monkeypatch.setattr("rayspec.serving.replica.httpx.get", lambda *_, **__: answer)
    monkeypatch.setattr(Replica, "_watch", lambda _: None)
    for _ in range(2):
        replica = Replica(version, told)
        replica._tell()
        replica._tell()
    assert board.totals("a").requests == 20


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
