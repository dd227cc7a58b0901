"""What a sweep's journal says: one event a line, `{"event": kind, ...}`.

The unit of measurement is the round: its trials answered the same prompts in the same window of time, on the same
machine. A part of a round cannot be paired with anything that is measured later.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from rayspec.records import BlockRecord, CanaryAnswer, Measured
from sglang_ext.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Recorded(Settings):
    """Events with equal values in the fields of `IDENTITY` are one event, which is written once."""

    IDENTITY: ClassVar[tuple[str, ...]] = ()

    event: str
    cohort: str | None = None  # None: of the whole sweep
    time: float = 0.0  # seconds since the epoch; 0 until it is written

    @property
    def identity(self) -> tuple[object, ...]:
        return self.event, *(getattr(self, name) for name in self.IDENTITY)


@dataclass(frozen=True, kw_only=True)
class EngineStarted(Recorded):
    IDENTITY = ("cohort", "engine", "seconds")

    event: Literal["engine"] = "engine"
    cohort: str
    engine: str
    seconds: float
    machine: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HeadsTimed(Recorded):
    event: Literal["heads"] = "heads"
    latency_s: dict[str, dict[str, float]]  # by traffic label and head


@dataclass(frozen=True, kw_only=True)
class RoundMeasured(Recorded):
    IDENTITY = ("index",)

    event: Literal["round"] = "round"
    cohort: str
    index: int
    prompt_block: int
    seconds: float
    blocks: dict[str, Measured]  # by trial name

    def block_records(self) -> dict[str, BlockRecord]:
        """The records of the round by the name of their trial."""
        return {
            name: BlockRecord(index=self.index, prompt_block=self.prompt_block, measured=measured)
            for name, measured in self.blocks.items()
        }


@dataclass(frozen=True, kw_only=True)
class TrialFailed(Recorded):
    """A trial failed, in a cohort or before there was any."""

    IDENTITY = ("cohort", "trial")

    event: Literal["failed"] = "failed"
    trial: str
    cause: str


@dataclass(frozen=True, kw_only=True)
class TrialDropped(Recorded):
    """A trial was given up as hopeless."""

    IDENTITY = ("trial",)

    event: Literal["dropped"] = "dropped"
    cohort: str
    trial: str
    passes: int


@dataclass(frozen=True, kw_only=True)
class TrafficFinished(Recorded):
    """The cohort is measured no more under this traffic."""

    IDENTITY = ("cohort", "traffic")

    event: Literal["finished"] = "finished"
    cohort: str
    traffic: str
    passes: int


@dataclass(frozen=True, kw_only=True)
class CanaryAnswered(Recorded):
    """A candidate, whose trials these are, has answered the canary prompts."""

    IDENTITY = ("cohort", "trials")

    event: Literal["canary"] = "canary"
    cohort: str
    trials: tuple[str, ...]
    answers: tuple[CanaryAnswer, ...]


@dataclass(frozen=True, kw_only=True)
class CohortEnded(Recorded):
    """Nothing more will be measured in it."""

    IDENTITY = ("cohort",)

    event: Literal["ended"] = "ended"
    cohort: str
    reason: str


Event = (
    EngineStarted
    | HeadsTimed
    | RoundMeasured
    | TrialFailed
    | TrialDropped
    | TrafficFinished
    | CanaryAnswered
    | CohortEnded
)


def to_line(event: Event, time_s: float) -> bytes:
    return json.dumps(asdict(replace(event, time=time_s))).encode() + b"\n"


def from_line(line: bytes) -> Event:
    """Raises ValueError for what is no event, or has no time."""
    try:
        event = _adapter().validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None
    if not event.time:
        raise ValueError("it has no time")
    return event


@cache
def _adapter() -> TypeAdapter[Event]:
    return TypeAdapter(Annotated[Event, Field(discriminator="event")])
