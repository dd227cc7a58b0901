"""What a roll-over did and why: in MLflow (tags of the registered version, a run with `events.jsonl` and metrics) and
as a line of JSON each, which `logs.py` prints."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from mlflow import MlflowClient

from rayspec.serving.logs import told_events
from rayspec.tracking import UNREACHABLE, Run

logger = logging.getLogger(__name__)
FILE = "events.jsonl"
TAG = "rollover"
STARTED, FOUND, POSTPONED, REFUSED = "started", "found", "postponed", "refused"
CANARY_PASSED, SWAPPED, KEPT, ROLLED_BACK = "canary_passed", "swapped", "kept", "rolled_back"
ROLLBACK_FAILED = "rollback_failed"


@dataclass(frozen=True, kw_only=True)
class Event:
    """`version` of the registered model; `figures` in the units of their names."""

    event: str
    model: str
    version: str
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class Events:
    """Of one `rayspec serve`. A store that is away loses no event: the next write holds all, and serving goes on."""

    def __init__(self, client: MlflowClient, model: str, experiment_id: str) -> None:
        self._client, self._model = client, model
        run = client.create_run(experiment_id, run_name=f"rollover {model}", tags={"rayspec.kind": "rollover"})
        self.run = Run(client, run.info.run_id)
        self.events: list[Event] = []
        self._written = 0

    def record(self, event: str, version: str, reason: str = "", figures: Mapping[str, float] | None = None) -> None:
        self.events.append(
            Event(event=event, model=self._model, version=version, reason=reason, figures=dict(figures or {}))
        )
        told_events.info("%s version %s: %s", event, version, reason, extra=asdict(self.events[-1]))
        self.write()

    def write(self) -> None:
        """All that is not in MLflow yet."""
        try:
            for step in range(self._written, len(self.events)):
                self._write(step, self.events[step])
                self._written = step + 1
            self.run.log_text("".join(json.dumps(asdict(e)) + "\n" for e in self.events), FILE)
        except UNREACHABLE as error:
            logger.warning("MLflow took no event of the roll-over; the next is written with it (%s)", error)

    def end(self) -> None:
        try:
            self.write()
            self.run.finish()
        except UNREACHABLE as error:
            logger.warning("MLflow's run of the roll-over stays open (%s)", error)

    def _write(self, step: int, event: Event) -> None:
        tags = {
            TAG: event.event,
            f"{TAG}.reason": event.reason,
            f"{TAG}.time": event.time,
            f"{TAG}.run_id": self.run.run_id,
        }
        for name, value in tags.items():
            self._client.set_model_version_tag(self._model, event.version, name, value[:5000])
        if event.figures:
            self.run.log_metrics(event.figures, step, time_s=time.time())
