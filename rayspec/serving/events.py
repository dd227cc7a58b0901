"""What a roll-over did and why: in MLflow (tags of the registered version, a run with `events.jsonl` and metrics) and
as a line of JSON each, which `logs.py` prints. What the next start must know of it is a tag of the registered model."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from rayspec.serving.kinds import CANARY_PASSED, FOUND, KEPT, REFUSED, ROLLBACK_FAILED, ROLLED_BACK, SWAPPED
from rayspec.serving.logs import event_log
from rayspec.tracking import Run, few_retries, is_refusal
from sglang_ext.settings import Settings, build

logger = logging.getLogger(__name__)
FILE = "events.jsonl"
TAG = "rollover"
# what a version that was not kept is called, by its last event
REFUSALS = {REFUSED: "refused", ROLLED_BACK: "rolled back", ROLLBACK_FAILED: "worse, and could not be rolled back"}
CUT_OFF = "found, but not tried to the end"
TRIALS = {FOUND: CUT_OFF, CANARY_PASSED: CUT_OFF, SWAPPED: "put in, but not watched to the end"}
VERSION = re.compile("[0-9]+")
WATCH_TIMEOUT_S = 20  # of a request to MLflow, while a version under traffic is to be watched
MAX_REASON = 1000  # characters of it in the model's tag


@dataclass(frozen=True, kw_only=True)
class Event:
    """`version` of the registered model; `figures` in the units of their names."""

    event: str
    model: str
    version: str
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


@dataclass(frozen=True, kw_only=True)
class Standing(Settings):
    """Where the roll-overs of an alias stand: `kept` was started or kept last, and `tried` was found after it and not
    kept, if there is one; `event` is the last about it."""

    kept: str
    tried: str = ""
    event: str = ""
    reason: str = ""
    time: str = ""

    def __post_init__(self) -> None:
        if not all(VERSION.fullmatch(version) for version in (self.kept, self.tried or "0")):
            raise ValueError("kept and tried must be numbers of versions")
        if self.tried and self.event not in REFUSALS | TRIALS:
            raise ValueError(f"event must be one of {', '.join(REFUSALS | TRIALS)}, got {self.event!r}")

    @property
    def is_refused(self) -> bool:
        return self.event in REFUSALS

    @property
    def told(self) -> str:
        """What became of the version that was tried."""
        said = f"version {self.tried} was {(REFUSALS | TRIALS)[self.event]} ({self.time})"
        return f"{said}: {self.reason}" if self.reason else said

    def after(self, event: Event) -> "Standing":
        if event.event == KEPT and self.tried not in ("", event.version):
            return replace(self, kept=event.version)  # it was watched to the end after another one was tried
        if event.event == KEPT or (event.event == FOUND and event.version == self.kept):
            return Standing(kept=event.version)
        if event.event not in REFUSALS | TRIALS:
            return self
        if event.event in (ROLLED_BACK, ROLLBACK_FAILED) and self.tried not in ("", event.version):
            return self  # the alias means the other one, which was tried since
        reason = event.reason[:MAX_REASON]
        return Standing(kept=self.kept, tried=event.version, event=event.event, reason=reason, time=event.time)


def standing_tag(alias: str) -> str:
    """The tag of the registered model that holds the alias's standing."""
    return f"{TAG}.{alias}"


def read_standing(client: MlflowClient, model: str, alias: str) -> Standing | None:
    """None where no roll-over has left any, and for a tag that cannot be read, of which it warns. Raises
    MlflowException."""
    text = client.get_registered_model(model).tags.get(standing_tag(alias))
    if text is None:
        return None
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it is no object")
        return build(Standing, found)
    except (ValueError, RecursionError) as error:
        logger.warning("the tag %s of the model %s is left out: %s", standing_tag(alias), model, error)
        return None


class Events:
    """The events of one `rayspec serve` that follows `alias` (model, alias). A store that is away loses no event: the
    next write holds all, and serving goes on. What MLflow refuses is left out of it, with a warning. `experiment_id`:
    None for no run. `count`: is told each event's kind."""

    def __init__(
        self,
        client: MlflowClient,
        alias: tuple[str, str],
        experiment_id: str | None,
        standing: Standing,
        count: Callable[[str], object] = lambda event: None,
    ) -> None:
        self._client, (self._model, self._alias) = client, alias
        self.run: Run | None = None
        if experiment_id is not None:
            name, tags = f"rollover {self._model}", {"rayspec.kind": "rollover"}
            self.run = Run(client, client.create_run(experiment_id, run_name=name, tags=tags).info.run_id)
        self.standing = standing
        self.events: list[Event] = []
        self._count = count
        self._written = 0
        self._stored: Standing | None = None

    def record(self, event: str, version: str, reason: str = "", figures: Mapping[str, float] | None = None) -> None:
        self.events.append(
            Event(event=event, model=self._model, version=version, reason=reason, figures=dict(figures or {}))
        )
        event_log.info("%s version %s: %s", event, version, reason, extra=asdict(self.events[-1]))
        self.standing = self.standing.after(self.events[-1])
        self._count(event)
        self.write()

    def forget(self) -> None:
        """Forget that a version was refused: the alias has moved."""
        if self.standing.is_refused:
            self.standing = Standing(kept=self.standing.kept)
        self.write()

    def write(self) -> None:
        """All that is not in MLflow yet. A store that does not answer keeps nobody from watching a version for long."""
        try:
            with few_retries(WATCH_TIMEOUT_S):
                self._write_all()
        except Exception as error:  # a store of artifacts raises its own library's; serving goes on whatever it is
            logger.warning("MLflow took no event of the roll-over; the next is written with it (%s)", error)

    def _write_all(self) -> None:
        if self.standing != self._stored:
            self._store(self.standing)
        for step in range(self._written, len(self.events)):
            self._write(step, self.events[step])
            self._written = step + 1
        if self.run is not None:
            with _refusals("events.jsonl"):
                self.run.log_text("".join(json.dumps(asdict(e)) + "\n" for e in self.events), FILE)

    def end(self) -> None:
        try:
            self.write()
            if self.run is not None:
                with few_retries(WATCH_TIMEOUT_S):
                    self.run.finish()
        except Exception as error:  # as above
            logger.warning("MLflow's run of the roll-over stays open (%s)", error)

    def _store(self, standing: Standing) -> None:
        with _refusals("where the roll-over stands, which the next start will not know"):
            self._client.set_registered_model_tag(self._model, standing_tag(self._alias), json.dumps(asdict(standing)))
            self._stored = standing

    def _write(self, step: int, event: Event) -> None:
        tags = {TAG: event.event, f"{TAG}.reason": event.reason, f"{TAG}.time": event.time}
        if self.run is not None:
            tags[f"{TAG}.run_id"] = self.run.run_id
        with _refusals(f"the event {event.event!r} as tags of version {event.version}"):
            for name, value in tags.items():
                self._client.set_model_version_tag(self._model, event.version, name, value[:5000])
        if event.figures and self.run is not None:
            with _refusals(f"the figures of the event {event.event!r}"):
                self.run.log_metrics(event.figures, step, time_s=time.time())


@contextmanager
def _refusals(of: str) -> Iterator[None]:
    """Where MLflow refuses something, warn that it is left out. Raises other errors."""
    try:
        yield
    except MlflowException as error:
        if not is_refusal(error):
            raise
        logger.warning("MLflow refuses %s, which is left out (%s)", of, error)
