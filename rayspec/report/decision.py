"""What to do with what was measured: under each traffic the fastest trial, and whether it beats plain decoding.

A claim is made only where the whole confidence interval is on one side of 1. The fastest of several is chosen by the
same numbers that its interval is made of, which flatters it a little; nothing here corrects for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayspec.farm.load import Traffic
from rayspec.statistics import Interval, beats_one

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The fastest trial under one traffic: of those that are clearly faster than plain decoding, if any are.

    `rivals` are the trials whose intervals overlap with its own.
    """

    traffic: Traffic
    best: "TrialResult | None"  # None where no speed-up could be measured
    rivals: "tuple[TrialResult, ...]" = ()

    @property
    def speedup(self) -> Interval | None:
        return self.best.speedup("plain") if self.best else None

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster than plain decoding; None where the interval leaves it open."""
        return beats_one(self.speedup) if self.speedup else None


def choices(results: "Sequence[TrialResult]") -> list[Choice]:
    """One for each traffic, in increasing order."""
    traffics = sorted({r.trial.traffic for r in results})
    return [_choice(traffic, [r for r in results if r.trial.traffic == traffic]) for traffic in traffics]


def decision(results: "Sequence[TrialResult]") -> str:
    """One line: what to serve with under each traffic, and where to leave speculation off."""
    made = choices(results)
    pays = [c for c in made if c.pays]
    off = [c for c in made if c.pays is False]
    unclear = [c for c in made if c.pays is None and c.best]
    unknown = [c for c in made if c.best is None]
    parts = [_gains(group) for group in _same_best(pays)]
    if off:
        how = "; ".join(f"{_setting(c)} {ratio(c.speedup)}" for c in off)
        parts.append(f"at {_loads(off)} turn speculation off (the best, {how}, is slower than plain decoding)")
    if unclear:
        how = "; ".join(f"{_setting(c)} {ratio(c.speedup)}" for c in unclear)
        reason = "the interval includes 1" if all(_has_interval(c) for c in unclear) else "too few blocks"
        parts.append(
            f"at {_loads(unclear)} nothing is clearly faster than plain decoding, so leave speculation off (the "
            f"best: {how}; {reason})"
        )
    if unknown:
        parts.append(f"at {_loads(unknown)} no speed-up could be measured")
    return "; ".join(parts) + "." if parts else "Nothing was measured."


def verdicts(results: "Sequence[TrialResult]") -> dict[Traffic, str]:
    """A sentence for each traffic."""
    return {c.traffic: verdict(c) for c in choices(results)}


def verdict(choice: Choice) -> str:
    """The fastest trial, and whether it beats plain decoding, the baseline and the other trials beyond doubt."""
    start = f"{choice.traffic}:"
    best, plain = choice.best, choice.speedup
    if best is None or plain is None:
        return f"{start} no speed-up could be measured."
    claim = {
        True: "speculation pays",
        False: "speculation does NOT pay, plain decoding is faster",
        None: "not clearly different from plain decoding",
    }[choice.pays]
    text = (
        f"{start} {claim}. Best: {best.trial.label} with {best.trial.draft_steps} draft steps, {ratio(plain)} of plain"
    )
    own = best.speedup("baseline")
    if not best.is_baseline and own is not None:
        claim = {True: "faster than", False: "slower than", None: "not clearly different from"}[beats_one(own)]
        text += f"; {claim} the baseline {best.baseline} with as many steps ({ratio(own)})"
    if choice.rivals:
        text += f"; its interval overlaps with {len(choice.rivals)} of the others'"
    return text + "."


def ratio(interval: Interval | None) -> str:
    """`1.18x [1.10, 1.27]`."""
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def _choice(traffic: Traffic, results: "Sequence[TrialResult]") -> Choice:
    drafted = [(r, interval) for r in results if (interval := r.speedup("plain")) is not None]
    if not drafted:
        return Choice(traffic=traffic, best=None)
    # a trial that is clearly faster than plain decoding goes before one that only seems to be
    best, own = max(drafted, key=lambda pair: (beats_one(pair[1]) is True, pair[1].value))
    rivals = tuple(r for r, interval in drafted if r is not best and _overlap(own, interval))
    return Choice(traffic=traffic, best=best, rivals=rivals)


def _overlap(one: Interval, other: Interval) -> bool:
    return _bounds(one)[0] <= _bounds(other)[1] and _bounds(other)[0] <= _bounds(one)[1]


def _bounds(interval: Interval) -> tuple[float, float]:
    """The ends of the interval; without one, everything is possible."""
    if interval.low is None or interval.high is None:
        return -math.inf, math.inf
    return interval.low, interval.high


def _has_interval(choice: Choice) -> bool:
    return choice.speedup is not None and choice.speedup.low is not None


def _setting(choice: Choice) -> str:
    assert choice.best is not None, "filtered by the caller"
    trial = choice.best.trial
    return f"{trial.label} at {trial.draft_steps} step{'s' if trial.draft_steps > 1 else ''}"


def _same_best(made: Sequence[Choice]) -> list[list[Choice]]:
    """Neighbours with the same head and draft steps together."""
    groups: list[list[Choice]] = []
    for choice in made:
        if groups and _setting(groups[-1][-1]) == _setting(choice):
            groups[-1].append(choice)
        else:
            groups.append([choice])
    return groups


def _gains(group: Sequence[Choice]) -> str:
    how = ", ".join(f"{ratio(c.speedup)} at {_loads([c])}" for c in group)
    text = f"{_setting(group[0])}: {how.replace(' at ', ' over plain decoding at ', 1)}"
    rivals = {(r.trial.label, r.trial.draft_steps) for c in group for r in c.rivals}
    if rivals:
        text += f" (its interval overlaps with {'that' if len(rivals) == 1 else 'those'} of {len(rivals)} other setting"
        text += f"{'s' if len(rivals) > 1 else ''})"
    return text


def _loads(made: Sequence[Choice]) -> str:
    return enumeration([c.traffic for c in made])


def enumeration(traffics: Sequence[Traffic]) -> str:
    """`1 stream`, `1, 4 and 8 streams`, `4 streams and 2.5 requests/s`, `1 stream (temperature 0) and 1 stream
    (temperature 1)`."""
    temperatures = dict.fromkeys(t.temperature for t in traffics)
    groups = {t: _enumerated([one for one in traffics if one.temperature == t]) for t in temperatures}
    return " and ".join(text if t is None else f"{text} (temperature {t:g})" for t, text in groups.items())


def _enumerated(traffics: Sequence[Traffic]) -> str:
    streams = [str(t.concurrency) for t in traffics if not t.is_open]
    rates = [f"{t.request_rate:g}" for t in traffics if t.is_open and not t.is_trace]
    speeds = [f"{t.trace_speed:g}x" for t in traffics if t.is_trace]
    parts = [f"{_listed(streams)} stream{'s' if streams != ['1'] else ''}"] if streams else []
    parts += [f"{_listed(rates)} requests/s"] if rates else []
    parts += [f"the trace at {_listed(speeds)}"] if speeds else []
    return " and ".join(parts)


def _listed(items: Sequence[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
