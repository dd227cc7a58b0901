"""Figures of a head's numeric options: tau and speed-up against one, for heads that differ in nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rayspec.farm.load import Traffic
from rayspec.plotting import colour, legend_below, marker, panels, shortened, steps_entries
from rayspec.report.speed_figures import axes_of, bounds

if TYPE_CHECKING:
    from rayspec.sweep.candidate import Candidate
    from rayspec.sweep.record.results import TrialResult

MIN_VALUES = 3  # of an option; fewer are better read from the table
WIDE_RANGE = 4  # largest over smallest value, from which on the axis is logarithmic
COLUMNS = 3


@dataclass(frozen=True, eq=False)
class Line:
    """Heads of one series and of as many draft steps, all other numbers equal, in the order of the option."""

    name: str
    draft_steps: int
    results: "tuple[TrialResult, ...]"  # under every traffic


def option_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """A row for each option of a kind of head that was measured at three values or more: tau under the lightest traffic
    (which it does not depend on), and the speed-up over plain decoding with its 95% interval, a panel a traffic. A
    dotted line is the baseline."""
    drafted = [r for r in results if r.trial.candidate is not None and "tau" in r.metrics and r.speedup("plain")]
    rows = option_lines(drafted)
    if not rows:
        return None
    _, traffics = axes_of(drafted)
    columns = min(COLUMNS, 1 + len(traffics))
    height = -(-(1 + len(traffics)) // columns)  # in panels
    figure, axes = panels(len(rows) * height * columns, width=4.4, height=3.5, columns=columns)
    names = list(dict.fromkeys(line.name for lines in rows.values() for line in lines))
    steps = sorted({line.draft_steps for lines in rows.values() for line in lines})
    for i, ((kind, option), lines) in enumerate(rows.items()):
        own = axes[i * height * columns : (i + 1) * height * columns]
        for unused in own[1 + len(traffics) :]:
            unused.remove()
        look = {
            line: {"color": colour(names.index(line.name)), "marker": marker(steps.index(line.draft_steps))}
            for line in lines
        }
        _draw_tau(own[0], drafted, lines, option, traffics[0], look)
        own[0].set_title(f"{kind}: tau, {traffics[0]}")
        for axis, traffic in zip(own[1:], traffics, strict=False):
            _draw_speedup(axis, drafted, lines, option, traffic, look)
            axis.set_title(f"{kind}: speed-up, {traffic}")
        for axis in own[: 1 + len(traffics)]:
            _scale(axis, sorted({_value(r, option) for line in lines for r in line.results}))
            axis.set_xlabel(option)
    heads = [(Line2D([], [], color=colour(i), linewidth=2), shortened(name, 60)) for i, name in enumerate(names)]
    baseline = (Line2D([], [], color="0.4", linestyle=":"), f"the baseline {drafted[0].baseline}")
    legend_below(figure, [*heads, *steps_entries(steps), baseline], columns=3)
    return figure


def option_lines(results: "Sequence[TrialResult]") -> dict[tuple[str, str], list[Line]]:
    """{(kind, option): lines}, of those options of which a kind has values enough."""
    lines: dict[tuple[str, str], list[Line]] = {}
    groups: dict[tuple[str, str], dict[tuple[str, int], list[TrialResult]]] = {}
    for r in results:
        candidate = r.trial.drafted
        for option in candidate.head.numbers:
            along = groups.setdefault((candidate.head.kind, option), {})
            along.setdefault((_name(candidate, option), candidate.draft_steps), []).append(r)
    for key, along in groups.items():
        found = [
            Line(name, steps, tuple(sorted(own, key=lambda r: _value(r, key[1]))))
            for (name, steps), own in along.items()
            if len({_value(r, key[1]) for r in own}) >= MIN_VALUES
        ]
        if found:
            lines[key] = found
    return lines


def _name(candidate: "Candidate", option: str) -> str:
    others = ", ".join(f"{name} {value}" for name, value in candidate.head.numbers.items() if name != option)
    return f"{candidate.series}{f' ({others})' if others else ''}"


def _value(result: "TrialResult", option: str) -> float:
    return result.trial.drafted.head.numbers[option]


def _draw_tau(
    axis: Axes,
    results: "Sequence[TrialResult]",
    lines: Sequence[Line],
    option: str,
    traffic: Traffic,
    look: Mapping[Line, Mapping[str, Any]],
) -> None:
    for line in lines:
        own = [r for r in line.results if r.trial.traffic == traffic]
        axis.plot([_value(r, option) for r in own], [r.metrics["tau"] for r in own], linewidth=1.5, **look[line])
        for base in _baselines(results, line, traffic):
            _draw_baseline(axis, line, option, base.metrics["tau"], look)
    axis.set_ylabel("tau (tokens per verify step)")


def _draw_speedup(
    axis: Axes,
    results: "Sequence[TrialResult]",
    lines: Sequence[Line],
    option: str,
    traffic: Traffic,
    look: Mapping[Line, Mapping[str, Any]],
) -> None:
    for line in lines:
        own = [(r, i) for r in line.results if r.trial.traffic == traffic and (i := r.speedup("plain")) is not None]
        if not own:
            continue
        values = [_value(r, option) for r, _ in own]
        low, high = zip(*(bounds(i) for _, i in own), strict=True)
        axis.plot(values, [i.value for _, i in own], linewidth=1.5, **look[line])
        axis.fill_between(values, low, high, color=look[line]["color"], alpha=0.12, linewidth=0)
        for edge in (low, high):  # where bands lie on each other
            axis.plot(values, edge, color=look[line]["color"], linewidth=0.7, alpha=0.5)
        for base in _baselines(results, line, traffic):
            if (interval := base.speedup("plain")) is not None:
                _draw_baseline(axis, line, option, interval.value, look)
    axis.axhline(1, color="black", linestyle="--", linewidth=1)
    axis.set_ylabel("over plain decoding (95% CI)")


def _draw_baseline(axis: Axes, line: Line, option: str, y: float, look: Mapping[Line, Mapping[str, Any]]) -> None:
    """Draw the baseline over the values of the line, with its marker of the draft steps."""
    ends = [_value(line.results[i], option) for i in (0, -1)]
    axis.plot(ends, [y, y], **{**look[line], "color": "0.4"}, markersize=4, linestyle=":", linewidth=1.2)


def _baselines(results: "Sequence[TrialResult]", line: Line, traffic: Traffic) -> "list[TrialResult]":
    return [
        r for r in results if r.is_baseline and (r.trial.traffic, r.trial.draft_steps) == (traffic, line.draft_steps)
    ]


def _scale(axis: Axes, values: Sequence[float]) -> None:
    if values[0] > 0 and values[-1] >= WIDE_RANGE * values[0]:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xticks(values, [f"{v:g}" for v in values])
