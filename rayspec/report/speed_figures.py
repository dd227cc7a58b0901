"""Figures of what a user feels: speed-up over plain decoding, by load, against latency, and by prompt category.

Everywhere: colour is the head (drafter_styles.DrafterStyles), the marker its draft steps, black is plain decoding.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from rayspec.farm.load import Traffic
from rayspec.plotting import LETTER_WIDTH, colour, counted, legend_below, marker, panels, shortened, steps_entries
from rayspec.report.drafter_styles import DrafterStyles
from rayspec.report.point_labels import CLEAR
from rayspec.statistics import Interval, beats_one

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult

WIDE_RANGE = 6  # largest over smallest value, from which on an axis is logarithmic
MIN_LOADS = 3  # fewer are better read from the panels of the speed-up figure


def axes_of(results: "Sequence[TrialResult]") -> tuple[list[int], list[Traffic]]:
    """Draft steps and traffics of the speculative trials, in increasing order."""
    drafted = [r.trial for r in results if r.trial.candidate is not None]
    return sorted({t.draft_steps for t in drafted}), sorted({t.traffic for t in drafted})


def speedup_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Speed-up over plain decoding with its 95% interval: a panel per traffic, a row per head."""
    results = [r for r in results if r.speedup("plain")]
    if not results:
        return None
    heads, (steps, traffics) = DrafterStyles.of(results), axes_of(results)
    height = 1.3 + 0.3 * len(heads.names) * max(2, len(steps))
    width = 3.2 + LETTER_WIDTH * max(map(len, heads.short_names)) / min(3, len(traffics))
    figure, axes = panels(len(traffics), width=width, height=height, share=True, columns=3)
    gap = 0.6 / len(steps)
    for axis, traffic in zip(axes, traffics, strict=True):
        for r in (r for r in results if r.trial.traffic == traffic):
            interval = r.speedup("plain")
            assert interval is not None, "filtered above"
            s = steps.index(r.trial.draft_steps)
            y = heads.names.index(r.trial.label) + (s - (len(steps) - 1) / 2) * gap
            low, high = bounds(interval)
            own = heads.colour(r.trial.label)
            axis.plot([low, high], [y, y], color=own, linewidth=2)
            axis.plot([interval.value], [y], color=own, marker=marker(s), markersize=6)
            axis.annotate(
                f"{interval.value:.2f}",
                (high, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                bbox=CLEAR,
            )
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.margins(x=0.12)
        axis.set_yticks(range(len(heads.names)), heads.short_names)
        axis.set_title(str(traffic))
        axis.set_xlabel("speed-up over plain decoding (x, 95% CI)")
    axes[0].set_ylim(len(heads.names) - 0.5, -0.5)
    legend_below(figure, steps_entries(steps))
    return figure


def load_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Speed-up over plain decoding against the number of streams, with its 95% interval: where it stops paying."""
    results = [r for r in results if r.speedup("plain") and not r.trial.traffic.is_open]
    heads, (steps, traffics) = DrafterStyles.of(results), axes_of(results)
    streams = sorted({t.concurrency for t in traffics})
    if len(streams) < MIN_LOADS:
        return None
    cells = [(temperature, s) for temperature in dict.fromkeys(t.temperature for t in traffics) for s in steps]
    figure, axes = panels(len(cells), width=5.2, height=3.8, share=True, columns=2)
    for axis, (temperature, s) in zip(axes, cells, strict=True):
        here = [r for r in results if (r.trial.traffic.temperature, r.trial.draft_steps) == (temperature, s)]
        for head in heads.names:
            own = sorted((r for r in here if r.trial.label == head), key=lambda r: r.trial.traffic)
            intervals = [interval for r in own if (interval := r.speedup("plain"))]
            loads = [r.trial.traffic.concurrency for r in own]
            low, high = zip(*map(bounds, intervals), strict=True) if intervals else ((), ())
            axis.plot(loads, [x.value for x in intervals], color=heads.colour(head), linewidth=1.5)
            axis.fill_between(loads, low, high, color=heads.colour(head), alpha=0.12, linewidth=0)
            for x, interval in zip(loads, intervals, strict=True):
                heads.point(axis, x, interval.value, head, marker(steps.index(s)))
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, [str(n) for n in streams])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(counted(s) if temperature is None else f"{counted(s)}, temperature {temperature:g}")
        axis.set_xlabel("streams")
    axes[0].set_ylabel("speed-up over plain decoding (95% CI)")
    legend_below(figure, heads.entries())
    return figure


def pareto_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Throughput against what a user waits for a token, in a panel per temperature; the line joins the trials that no
    other beats in both.

    Closed loops only: in an open loop the arrivals fix the throughput.
    """
    needed = {"tpot_ms_p50", "output_tokens_per_s"}
    results = [r for r in results if needed <= set(r.metrics) and not r.trial.traffic.is_open]
    if len(results) < 2:
        return None
    heads, (steps, _) = DrafterStyles.of(results), axes_of(results)
    temperatures = sorted({r.trial.traffic.temperature for r in results}, key=lambda t: t or 0.0)
    figure, axes = panels(len(temperatures), width=7.0, height=4.8, share=True, columns=2)
    for axis, temperature in zip(axes, temperatures, strict=True):
        here = [r for r in results if r.trial.traffic.temperature == temperature]
        best = frontier(here)
        axis.plot(*zip(*map(_latency_and_throughput, best), strict=True), color="0.55", linewidth=1.5, zorder=1)
        for r in here:
            x, y = _latency_and_throughput(r)
            if r.trial.candidate is None:
                axis.plot(x, y, color="black", marker="*", markersize=12, linestyle="none", zorder=3)
            else:
                heads.point(axis, x, y, r.trial.label, marker(steps.index(r.trial.draft_steps)))
        for traffic in sorted({r.trial.traffic for r in here}):
            cloud = [_latency_and_throughput(r) for r in here if r.trial.traffic == traffic]
            where = (sum(x for x, _ in cloud) / len(cloud), max(y for _, y in cloud))
            text = str(traffic)
            axis.annotate(text, where, (0, 10), textcoords="offset points", ha="center", color="0.35", fontsize=9)
        points = list(map(_latency_and_throughput, results))  # all panels have one scale
        for one, set_scale, values in zip(
            (axis.xaxis, axis.yaxis), (axis.set_xscale, axis.set_yscale), zip(*points, strict=True), strict=True
        ):
            if max(values) > WIDE_RANGE * min(values):  # else a logarithmic axis has hardly a round number
                set_scale("log")
                one.set_major_locator(LogLocator(subs=(1, 2, 5)))
                one.set_minor_locator(NullLocator())
            one.set_major_formatter(lambda value, _: f"{value:g}")
        axis.margins(x=0.08, y=0.15)
        axis.set_xlabel("median time per output token of a request (ms): left is better")
    axes[0].set_ylabel("output tokens/s of all streams: up is better")
    plain = (Line2D([], [], color="black", marker="*", markersize=10, linestyle="none"), "plain decoding")
    line = (Line2D([], [], color="0.55", linewidth=1.5), "beaten by none in both")
    legend_below(figure, [*heads.entries(), *steps_entries(steps), plain, line], columns=4)
    return figure


def frontier(results: "Sequence[TrialResult]") -> "list[TrialResult]":
    """The trials that no other beats in both median TPOT and throughput, by increasing TPOT."""
    ordered = sorted(results, key=lambda r: (r.metrics["tpot_ms_p50"], -r.metrics["output_tokens_per_s"]))
    best: list[TrialResult] = []
    for r in ordered:
        if not best or r.metrics["output_tokens_per_s"] > best[-1].metrics["output_tokens_per_s"]:
            best.append(r)
    return best


def category_speedup_figure(
    speedups: Mapping[str, Mapping[str, Interval]], counts: Mapping[str, int] | None = None
) -> Figure:
    """Speed-up of some trials over plain decoding by prompt category, {trial: {category: speed-up}}.

    `counts` are the prompts of each category.

    With 95% intervals: orange where speculation hurts beyond doubt, grey where the interval includes 1 or there is
    none.
    """
    names = sorted({name for own in speedups.values() for name in own})
    figure, axes = panels(len(speedups), width=4.6, height=1.2 + 0.27 * len(names), share=True, columns=2)
    for axis, (trial, own) in zip(axes, speedups.items(), strict=True):
        for name, interval in own.items():
            y, tint = names.index(name), {True: colour(0), False: colour(1), None: "0.55"}[beats_one(interval)]
            axis.plot(bounds(interval), [y, y], color=tint, linewidth=2)
            axis.plot([interval.value], [y], color=tint, marker="o", markersize=5)
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        known = counts or {}
        labels = [f"{shortened(n)} (n = {known[n]})" if n in known else shortened(n) for n in names]
        axis.set_yticks(range(len(names)), labels)
        axis.set_title(shortened(trial, 40))
        axis.set_xlabel("speed-up over plain decoding (x, 95% CI)")
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    entries = [("faster", colour(0)), ("slower", colour(1)), ("not clearly either", "0.55")]
    legend_below(figure, [(Line2D([], [], color=tint, marker="o"), text) for text, tint in entries])
    return figure


def bounds(interval: Interval) -> tuple[float, float]:
    """The ends of an interval, both the value where there is none."""
    if interval.low is None or interval.high is None:
        return interval.value, interval.value
    return interval.low, interval.high


def _latency_and_throughput(result: "TrialResult") -> tuple[float, float]:
    return result.metrics["tpot_ms_p50"], result.metrics["output_tokens_per_s"]
