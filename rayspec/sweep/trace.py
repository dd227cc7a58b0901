"""Settings of a trace that a sweep replays. Field paths are those of configs/sweep/*.yaml."""

from dataclasses import dataclass, field

from rayspec.workloads.traces import UNITS
from sglang_ext.settings import Settings

MIN_SPEED, MAX_SPEED = 1e-6, 1e6
MAX_SECONDS = 1e9
OWN_PROMPTS = "trace"  # the workload of a trace that says what was asked


@dataclass(frozen=True, kw_only=True)
class TraceConfig(Settings):
    """A file of `rayspec.workloads.traces`, replayed whether or not answers are there."""

    path: str = ""
    speed: list[float] = field(default_factory=lambda: [1.0])  # 2: twice as fast; each is a load of its own
    unit: str | None = None  # of timestamps that are numbers, s or ms; None: they are dates
    start_s: float = 0.0  # what is replayed begins so long after the trace's first request ...
    duration_s: float | None = None  # ... and is so long, by the trace's own clock; None: to its end

    def __post_init__(self) -> None:
        if not self.speed or not all(MIN_SPEED <= speed <= MAX_SPEED for speed in self.speed):
            raise ValueError(f"trace.speed must be a list of factors in {MIN_SPEED:g}..{MAX_SPEED:g}, got {self.speed}")
        if len({f"{speed:g}" for speed in self.speed}) < len(self.speed):
            raise ValueError(f"trace.speed must be different in their first six digits, got {self.speed}")
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(f"trace.unit must be one of {', '.join(UNITS)}, or absent for dates, got {self.unit!r}")
        if not 0 <= self.start_s <= MAX_SECONDS:
            raise ValueError(f"trace.start_s must be in 0..{MAX_SECONDS:g}, got {self.start_s}")
        if self.duration_s is not None and not 0 < self.duration_s <= MAX_SECONDS:
            raise ValueError(
                f"trace.duration_s must be above 0 and at most {MAX_SECONDS:g}, or absent, got {self.duration_s}"
            )
        if not self.path.strip():
            raise ValueError("trace.path must name a CSV or JSONL file, got nothing")
