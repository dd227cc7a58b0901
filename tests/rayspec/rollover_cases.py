"""A registry whose alias moves, and a stage that says what it was asked to put in."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run
from versions import MODEL, answers, champion

from rayspec.serving import cluster
from rayspec.serving.alias import MlflowRegistry
from rayspec.serving.canary import Answer
from rayspec.serving.champion import Champion
from rayspec.serving.cluster import EXPERIMENT, Following, follow
from rayspec.serving.events import Events, Standing, read_standing
from rayspec.serving.figures import Totals
from rayspec.serving.rollover import Rollover, RolloverSettings
from rayspec.serving.start import Start

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
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{x="a"} 400.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device"} 60.0
sglang:cached_tokens_total{cache_source="host"} 40.0
# TYPE sglang:http_requests_total counter
sglang:http_requests_total{endpoint="/generate",method="POST"} 12.0
sglang:http_requests_total{endpoint="/health",method="GET"} 50.0
"""


class FakeStage:
    """Versions by number: what `canary` gives, or the error that `check` raises."""

    follows_policy = adapts = False

    def __init__(self) -> None:
        self.canaries: dict[str, Any] = {}
        self.checks: dict[str, Exception] = {}
        self.running: Any = answers(1.5)
        self.now = 0.0
        self.live: dict[str, Callable[[float], Totals]] = {}  # by the time
        self.put: list[str] = []
        self.broken: dict[str, list[Exception]] = {}  # what the next attempts to put a version in raise
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
        if self.broken.get(version):
            raise self.broken[version].pop()
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


def make_registry(folder: Path) -> Path:
    """A real store with three versions, the first of which the alias means; a new one takes MLflow seconds."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_registered_model(MODEL)
    for _ in range(3):
        client.create_model_version(MODEL, folder.as_uri())
    client.set_registered_model_alias(MODEL, "champion", "1")
    return folder / "mlflow.db"


def make_world(registry: Path, folder: Path) -> World:
    """A copy of the registry, and the first version running; time passes only in sleeps."""
    shutil.copy(registry, folder)
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment(EXPERIMENT, artifact_location=(folder / "artifacts").as_uri())
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


def traffic(requests: float = 100, *, accepted: float = 1.5, token_s: float = 0.01, first: float = 0.6) -> Totals:
    tokens = 25 * requests
    return Totals(
        asked=requests,
        first_tokens=requests,
        prompt_tokens=40 * requests,
        requests=requests,
        tokens=tokens,
        verified=10 * requests,
        accepted=10 * requests * accepted,
        drafted_first=10 * requests,
        accepted_first=10 * requests * first,
        ttft_s=0.1 * requests,
        e2e_s=0.1 * requests + (tokens - requests) * token_s,
    )


def find(source: str) -> Champion:
    return champion(source.rpartition("/")[2])


class Ended(Exception):
    """The command, in any way."""


def follow_again(world: World, start: Start, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command does once its replicas are up, until it has looked at the alias once. The kinds of the events
    that the board was told."""

    def end(seconds: float) -> None:
        raise Ended

    serving: Any = SimpleNamespace(version=lambda *_: None, more=(), follows_policy=False)
    monkeypatch.setattr(cluster, "RayStage", lambda *_: world.stage)
    counted: list[str] = []
    board = SimpleNamespace(count=SimpleNamespace(remote=counted.append))
    settings = RolloverSettings(watch_s=0)
    following = Following(client=world.client, alias=ALIAS, settings=settings, wait=end, standing=start.standing)
    with pytest.raises(Ended):
        follow(start.champion, start.source, serving, following, board)
    return counted


def be_slow(world: World) -> None:
    world.stage.live = {champion("1").name: traffic, champion("2").name: lambda now: traffic(now, token_s=1.0)}


def be_poor(world: World) -> None:
    world.stage.canaries["2"] = answers(0.0)
