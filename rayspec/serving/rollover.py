"""When an alias has moved, puts another version under traffic, or says why not.

`Rollover` decides. What it decides about is behind two small protocols: a `Registry` (which version is meant) and a
`Stage` (check it, start a canary, put it in). Neither of them knows `Rollover`.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rayspec.messages import first_line
from rayspec.serving import kinds
from rayspec.serving.canary import Answer, CanaryBounds, passed, refusal, tau
from rayspec.serving.champion import Champion
from rayspec.serving.events import Events
from rayspec.serving.figures import Totals, WatchBounds, Window, pooled, silent, spent, window, worse
from rayspec.serving.logs import log

WATCH_STEP_S = 5.0
MAX_S = 86400.0
TRIED_EVERY = 32  # looks at the alias, a version that is postponed again and again
PATH = re.compile(r"'/[^']*'")


class Postponed(Exception):
    """Nothing was decided, for a reason that lies outside of the version; it is tried again."""


@dataclass(frozen=True, kw_only=True)
class RolloverSettings:
    poll_s: float = 30.0
    watch_s: float = 300.0
    canary: CanaryBounds = field(default_factory=CanaryBounds)
    watch: WatchBounds = field(default_factory=WatchBounds)

    def __post_init__(self) -> None:
        if not 0 < self.poll_s <= MAX_S:
            raise ValueError(f"--poll-seconds must be above 0 and at most {MAX_S:g} (a day), got {self.poll_s:g}")
        if not 0 <= self.watch_s <= MAX_S:
            raise ValueError(f"--watch-seconds must be in 0..{MAX_S:g} (a day), got {self.watch_s:g}")


class Registry(Protocol):
    def meant(self) -> str | None:
        """The version that the alias points at; None where it is not there. Raises Postponed for an outage."""


class Stage(Protocol):
    follows_policy: bool
    adapts: bool  # by SGLang's own flags: draft lengths of its servers, whatever their version, differ with their load

    def check(self, version: str) -> Champion:
        """Raises ValueError for what may not take traffic, Postponed for an outage."""

    def canary(self, champion: Champion, version: str) -> list[Answer]:
        """Answers of a server of its own, which has ended since. Raises ValueError where it does not serve, Postponed
        where there is no room for it."""

    def running_answers(self) -> list[Answer]:
        """Answers of the version under traffic. Raises Postponed."""

    def put_in(self, champion: Champion, version: str) -> None:
        """Replace all replicas; the old ones stay where it raises ValueError, or Postponed for what is no fault of the
        version."""

    def totals(self, champion: Champion) -> Totals | None:
        """What its replicas have counted; None where that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Before:
    """The version that was under traffic before one that has not been watched to the end, and its traffic then."""

    champion: Champion
    version: str
    traffic: Window


@dataclass(frozen=True, kw_only=True)
class RollBack:
    """Why the version before is to come back."""

    reason: str
    figures: dict[str, float]


class Rollover:
    """`champion` is under traffic as `version`. `refused`: a version that is not tried until the alias moves."""

    def __init__(
        self,
        champion: Champion,
        version: str,
        registry: Registry,
        stage: Stage,
        events: Events,
        settings: RolloverSettings,
        *,
        refused: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.champion, self.version = champion, version
        self.refused = refused
        self._registry, self._stage, self._events, self._settings = registry, stage, events, settings
        self._clock, self._sleep = clock, sleep
        self._seen: deque[tuple[float, Totals]] = deque()
        self._postponed_for = ""  # why the last one was; each reason is recorded once
        self._owed: RollBack | None = None  # which could not be made yet
        self._before: Before | None = None  # what the running version is held against, until it is kept
        self._tried, self._looks = "", 0  # a version that was postponed, and the looks at it so far

    def run(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Poll until an exception ends it. `wait` takes the seconds until the next poll, and may return before."""
        while True:
            try:
                self.poll()
            except Exception:  # whatever it is, serving goes on
                log.exception("the alias was not followed this time")
            wait(self._settings.poll_s)

    def poll(self) -> None:
        """Look at the alias once, and do all that follows."""
        self._remember()
        unsettled, meant = None if self._before is None else self.version, None
        try:
            if self._owed is not None:  # whatever the alias means by now is then held against a good version
                self._roll_back(self._owed)
            meant = self._registry.meant()
            self._follow(meant)
        except (Postponed, OSError) as error:  # a full disk, or a store that breaks off: serving goes on
            self._postpone(str(error) or type(error).__name__, meant or self.version)
        if self._before is not None and self.version == unsettled and self._owed is None:
            # its watch was ended for a version that has not taken its place
            self._watch(None, meant or self.version)

    def _follow(self, meant: str | None) -> None:
        if meant is None or meant == self.refused:
            return
        if self.refused is not None:
            self.refused = None
            self._events.forget()
        if self._before is not None and meant == self._before.version:
            return  # it comes back as the watch ends
        if meant != self.version:
            if not self._is_due(meant):
                return
            self._try(meant)
        self._tried = self._postponed_for = ""

    def _is_due(self, version: str) -> bool:
        """Count a look at a version that is to be tried: at the 1st, 2nd, 4th, 8th ... of those in a row it is, and at
        every `TRIED_EVERY`th. Each try costs a canary, perhaps a start of all replicas."""
        self._looks = self._looks + 1 if version == self._tried else 1
        self._tried = version
        return self._looks.bit_count() == 1 or self._looks % TRIED_EVERY == 0

    def _try(self, version: str) -> None:
        if not self._postponed_for:
            self._events.record(kinds.FOUND, version, f"version {self.version} is running")
        # before the canary, which the running version answers beside its traffic
        before = self._before or Before(champion=self.champion, version=self.version, traffic=self._recent())
        try:
            champion = self._stage.check(version)
            if champion.record.target_sha256 != self.champion.record.target_sha256:
                raise ValueError(
                    f"it was measured on target {champion.record.target}, and version {self.version}, which is "
                    f"running, on {self.champion.record.target}, whose files are others; a roll-over changes the "
                    "drafter alone: serve another target by a command of its own"
                )
            new = self._stage.canary(champion, version)
            running = self._stage.running_answers()
            reason = self._refusal(champion, new, running)
            if reason is not None:
                return self._refuse(version, reason, _figures(new, running))
            said = passed(new, running, champion.record)
            self._events.record(kinds.CANARY_PASSED, version, said, _figures(new, running))
            counted = self._stage.totals(champion)  # where it was under traffic once before
            self._stage.put_in(champion, version)
        except ValueError as error:
            return self._refuse(version, str(error), {})
        except (Postponed, OSError):
            raise
        except Exception as error:  # whatever it is, the version under traffic goes on
            log.exception("version %s was not put in", version)
            raise Postponed(f"{type(error).__name__}: {first_line(error)}") from error
        in_place = f"in place of version {self.version}"
        self.champion, self.version, self._before, self._owed = champion, version, before, None
        self._seen.clear()
        self._events.record(kinds.SWAPPED, version, in_place)
        self._watch(counted, version)

    def _refusal(self, champion: Champion, new: Sequence[Answer], running: Sequence[Answer]) -> str | None:
        return refusal(
            new,
            running,
            champion.record,
            self.champion.record,
            self._settings.canary,
            compares_tau=not self._has_policy(self.champion),
        )

    def _watch(self, counted: Totals | None, meant: str) -> None:
        """Hold the running version against the one before until that is settled, or the alias means another one than
        `meant`. `counted`: what its replicas had counted when it was put in."""
        assert self._before is not None, "a version that was put in has one before it until it is kept"
        last = self._before
        settings, version, before = self._settings, self.version, last.traffic
        of_first_drafts = self._has_policy(self.champion) or self._has_policy(last.champion)
        begin, share, reason, meant_first = self._clock(), 0.0, None, meant
        marks = [] if counted is None else [counted]
        while share < 1 and reason is None and meant == meant_first:
            left = begin + settings.watch_s - self._clock()
            self._sleep(min(WATCH_STEP_S, max(0.0, left)))
            totals = self._stage.totals(self.champion)
            if totals is not None:
                marks.append(totals)
            looked_at = share
            share = min(1.0, (self._clock() - begin) / settings.watch_s) if settings.watch_s else 1.0
            now, level = window(marks), spent(share) - spent(looked_at)
            reason = worse(now, before, settings.watch, of_first_drafts=of_first_drafts, level=level)
            meant = self._meant_meanwhile(meant)
            if reason is None and meant == last.version:
                reason = f"the alias means version {last.version} again"
        if reason is None and share == 1:
            reason = silent(now, before, settings.watch)
        figures = _watched(pooled(now), pooled(before))
        if reason is not None:
            return self._roll_back(RollBack(reason=reason, figures=figures))
        if meant != meant_first:
            return self._events.record(kinds.WATCH_ENDED, version, f"the alias means version {meant} now", figures)
        if totals is None:
            said = "it could not be watched to the end: the counters of its replicas cannot be read"
        elif min(pooled(now).requests, pooled(before).requests) < settings.watch.min_requests:
            said = "too few requests to judge it under traffic"
        elif doubt := worse(now, before, settings.watch, of_first_drafts=of_first_drafts, level=1.0):
            said = f"{doubt}; by so few readings of the counters, or such uneven ones, chance may explain it"
        else:
            said = "within bounds under traffic"
        self._before = None
        self._events.record(kinds.KEPT, version, said, figures)

    def _meant_meanwhile(self, so_far: str) -> str:
        """The version that the alias means while one is watched, which goes on where nobody can say."""
        try:
            return self._registry.meant() or so_far
        except Postponed:
            return so_far

    def _roll_back(self, back: RollBack) -> None:
        assert self._before is not None, "it stays until it is back, or cannot be served"
        version, last = self.version, self._before
        try:
            self._stage.put_in(last.champion, last.version)
        except Exception as error:  # whatever it is, what runs goes on running
            return self._owe(back, error)
        self.champion, self.version, self._before, self._owed = last.champion, last.version, None, None
        self.refused = self.refused or version  # one that was tried since is what the alias means
        self._seen.clear()
        said = f"{back.reason}; version {last.version} is back"
        self._events.record(kinds.ROLLED_BACK, version, said, back.figures)

    def _owe(self, back: RollBack, error: Exception) -> None:
        """Of a roll-back that was not made: said once, and made at a later poll unless its version is to blame."""
        is_new, is_final = self._owed is not back, isinstance(error, ValueError)
        if is_new and not isinstance(error, (ValueError, Postponed, OSError)):
            log.exception("version %s was not rolled back", self.version)
        if is_new or is_final:
            said = str(error) if is_final else first_line(error) or type(error).__name__
            self._events.record(kinds.ROLLBACK_FAILED, self.version, f"{back.reason}; {said}", back.figures)
        self._owed = None if is_final else back
        if is_final:
            self._before = None

    def _refuse(self, version: str, reason: str, figures: dict[str, float]) -> None:
        self.refused = version
        self._events.record(kinds.REFUSED, version, reason, figures)

    def _postpone(self, reason: str, version: str) -> None:
        about = PATH.sub("", reason)  # a file that could not be written has another name each time
        if about != self._postponed_for:
            self._postponed_for = about
            self._events.record(kinds.POSTPONED, version, reason)

    def _has_policy(self, champion: Champion) -> bool:
        return self._stage.adapts or (self._stage.follows_policy and champion.policy is not None)

    def _remember(self) -> None:
        """The counters of the running version, back to one window before now, or as far as it takes for enough
        requests."""
        now, totals = self._clock(), self._stage.totals(self.champion)
        if totals is None:
            return
        if [seen for _, seen in self._seen][-2:] == [totals, totals]:
            self._seen.pop()  # nobody has asked for anything: one part, however long
        self._seen.append((now, totals))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._settings.watch_s:
            if (totals - self._seen[1][1]).requests < self._settings.watch.min_requests:
                break
            self._seen.popleft()

    def _recent(self) -> Window:
        """The window of the running version."""
        return window([seen for _, seen in self._seen])


def _figures(new: Sequence[Answer], running: Sequence[Answer]) -> dict[str, float]:
    found = {"canary_tau": tau(new), "canary_tau_running": tau(running)}
    return {name: value for name, value in found.items() if value is not None}


def _watched(now: Totals, before: Totals) -> dict[str, float]:
    found: dict[str, float] = {}
    for suffix, totals in (("", now), ("_before", before)):
        figures = {
            "requests": totals.requests,
            "tau": totals.tau,
            "tau_of_first": totals.tau_of_first,
            "token_ms": _ms(totals.token_s),
            "first_token_ms": _ms(totals.first_token_s),
            "deaths": totals.deaths,
        }
        found |= {f"watch_{name}{suffix}": value for name, value in figures.items() if value is not None}
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
