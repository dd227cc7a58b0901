"""Settings of a trace that a sweep replays. Field paths are those of configs/sweep/*.yaml."""

from dataclasses import dataclass, field

from rayspec.workloads.traces import UNITS
from sglang_ext.settings import Settings, require

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
        are_speeds = bool(self.speed) and all(MIN_SPEED <= speed <= MAX_SPEED for speed in self.speed)
        require(are_speeds, "trace.speed", self.speed, f"a list of factors in {MIN_SPEED:g}..{MAX_SPEED:g}")
        are_told_apart = len({f"{speed:g}" for speed in self.speed}) == len(self.speed)
        require(are_told_apart, "trace.speed", self.speed, "different in their first six digits")
        is_unit = self.unit is None or self.unit in UNITS
        require(is_unit, "trace.unit", self.unit, f"one of {', '.join(UNITS)}, or absent for dates")
        require(0 <= self.start_s <= MAX_SECONDS, "trace.start_s", self.start_s, f"in 0..{MAX_SECONDS:g}")
        is_duration = self.duration_s is None or 0 < self.duration_s <= MAX_SECONDS
        allowed = f"above 0 and at most {MAX_SECONDS:g}, or absent"
        require(is_duration, "trace.duration_s", self.duration_s, allowed)
        if not self.path.strip():
            raise ValueError("trace.path must name a CSV or JSONL file, got nothing")
