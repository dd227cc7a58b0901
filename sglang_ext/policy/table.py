"""`policy.json`: what a decode step costs with each draft length and each number of requests, and how often drafts are
accepted, as a sweep measured them."""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from sglang_ext.json_text import check_mapping, parse_json
from sglang_ext.settings import Settings, build

FORMAT = 1
MAX_DRAFT_STEPS, MAX_REQUESTS = 1024, 2**20  # far beyond any engine
MAX_NUMBER = 1e12  # of steps, verifications and shares
MIN_MS, MAX_MS = 1e-4, 1e8  # of a step: a tenth of a microsecond, and a day


@dataclass(frozen=True, kw_only=True)
class CostCurve(Settings):
    """Milliseconds of a decode step of one draft length; `draft_steps` 0 is plain decoding.

    `requests`: how many were decoded together, ascending; `step_ms` has a value for each.
    """

    draft_steps: int
    requests: list[int]
    step_ms: list[float]

    def __post_init__(self) -> None:
        if not 0 <= self.draft_steps <= MAX_DRAFT_STEPS:
            raise ValueError(f"draft_steps must be in 0 (plain decoding)..{MAX_DRAFT_STEPS}, got {self.draft_steps}")
        loads = [0, *self.requests, MAX_REQUESTS + 1]
        if not self.requests or any(a >= b for a, b in pairwise(loads)):
            raise ValueError(f"requests must be ascending numbers in 1..{MAX_REQUESTS}, got {self.requests}")
        if len(self.step_ms) != len(self.requests) or not all(MIN_MS <= ms <= MAX_MS for ms in self.step_ms):
            raise ValueError(
                f"step_ms must hold a time in {MIN_MS:g}..{MAX_MS:g} ms for each of the {len(self.requests)} requests, "
                f"got {self.step_ms}"
            )

    def at(self, requests: int) -> float:
        """Between two measured loads on the line through them, below the first its time, and above the last on the
        line that led there, where that rises."""
        x, y = self.requests, self.step_ms
        if requests <= x[0] or len(x) == 1:
            return y[0]
        right = min(bisect_left(x, requests), len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        if requests > x[-1]:
            return y[-1] + max(slope, 0.0) * (requests - x[-1])
        return y[right - 1] + slope * (requests - x[right - 1])


@dataclass(frozen=True, kw_only=True)
class PolicyTable(Settings):
    """All that a policy knows before the first request.

    Args:
        curves: of plain decoding and of each draft length that may be chosen.
        accepted_if_reached: share of accepted drafts at positions 1, 2, ... among the steps that accepted all before:
            what is expected as long as nothing was seen.
        margin: by what share a longer draft must promise more tokens per second before it is taken; a shorter one (and
            plain decoding) only has to promise more.
        half_life_steps: after so many steps what was accepted in one counts half.
        prior_verifications: how many verifications of a draft `accepted_if_reached` weighs as much as, at first; what
            is known later weighs as much at least.
        request_concentration: how alike the drafts of one request are accepted: it is trusted as much as what is common
            to all after so many verifications of its own. Small where requests are unlike each other.
        try_steps: for so many steps a draft is tried although it is not expected to pay: what is not drafted is never
            known better.
        try_cost: what a try is expected to lose, as a share of the time since the last one: it waits until then.
        dwell_steps: a length stays for so many steps at least.
        rest_after_steps: after so many steps in which no draft would pay the drafter rests: its cache is not kept up,
            and the requests that are running then are decoded plainly to their end.
        about: where the numbers come from.
    """

    format_version: int
    curves: list[CostCurve]
    accepted_if_reached: list[float]
    margin: float = 0.02
    half_life_steps: int = 1000
    prior_verifications: float = 10.0
    request_concentration: float = 16.0
    try_steps: int = 8
    try_cost: float = 0.005
    dwell_steps: int = 4
    rest_after_steps: int = 32
    about: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format_version != FORMAT:
            raise ValueError(
                f"format_version must be {FORMAT}, got {self.format_version}; write the file anew with this release "
                "(rayspec report --emit)"
            )
        lengths = [curve.draft_steps for curve in self.curves]
        if len(set(lengths)) != len(lengths) or 0 not in lengths or len(lengths) < 2:
            raise ValueError(
                f"curves must be of draft_steps 0 (plain decoding) and of at least one draft length, each once, got "
                f"{lengths}"
            )
        if len(self.accepted_if_reached) < max(lengths) or not all(0 <= a <= 1 for a in self.accepted_if_reached):
            raise ValueError(
                f"accepted_if_reached must hold a share from 0 to 1 for each of {max(lengths)} draft positions, got "
                f"{self.accepted_if_reached}"
            )
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be from 0 up to 1, got {self.margin}")
        for name in (
            "half_life_steps",
            "prior_verifications",
            "request_concentration",
            "try_steps",
            "try_cost",
            "dwell_steps",
            "rest_after_steps",
        ):
            if not 0 < getattr(self, name) <= MAX_NUMBER:
                raise ValueError(f"{name} must be positive and at most {MAX_NUMBER:g}, got {getattr(self, name)}")

    @cached_property
    def lengths(self) -> list[int]:
        """The draft lengths that may be chosen, ascending from 0."""
        return sorted(curve.draft_steps for curve in self.curves)

    def step_ms(self, draft_steps: int, requests: int) -> float:
        return self._curves[draft_steps].at(requests)

    @cached_property
    def _curves(self) -> dict[int, CostCurve]:
        return {curve.draft_steps: curve for curve in self.curves}


def read_table(file: Path | str) -> PolicyTable:
    """Raises ValueError, naming the file, for one that cannot be read or holds something else."""
    try:
        return build(PolicyTable, check_mapping(parse_json(Path(file).read_bytes()), "it"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the policy {file} cannot be used: {error} (rayspec report --promote makes one of a sweep of two loads)"
        ) from error
