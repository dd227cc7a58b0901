"""Figures of what a user feels: speed-up over plain decoding, by load, against latency, and by prompt category.

Everywhere: colour is the head, the marker its draft steps, black is plain decoding.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rayspec.report.decision import beats_one
from rayspec.report.style import (
    colour,
    head_entries,
    legend_below,
    marker,
    panels,
    steps_entries,
    streams,
)
from rayspec.statistics import Interval

if TYPE_CHECKING:
    from rayspec.sweep.results import TrialResult

LEAST_LOADS = 3  # fewer are better read from the panels of the speed-up figure


def values(results: "Sequence[TrialResult]") -> tuple[list[str], list[int], list[int]]:
    """Heads in the sweep's order, draft steps and numbers of streams in increasing order; of speculative trials."""
    drafted = [r.trial for r in results if r.trial.drafter is not None]
    heads = list(dict.fromkeys(t.head for t in drafted))
    return heads, sorted({t.draft_steps for t in drafted}), sorted({t.concurrency for t in drafted})


def speedup_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Throughput over plain decoding with its 95% interval: a panel per number of streams, a row per head."""
    results = [r for r in results if r.speedup("plain")]
    if not results:
        return None
    heads, steps, concurrencies = values(results)
    height = 1.3 + 0.3 * len(heads) * max(2, len(steps))
    figure, axes = panels(len(concurrencies), width=4.4, height=height, share=True, columns=3)
    gap = 0.6 / len(steps)
    for axis, c in zip(axes, concurrencies, strict=True):
        for r in (r for r in results if r.trial.concurrency == c):
            interval = r.speedup("plain")
            assert interval is not None, "filtered above"
            s = steps.index(r.trial.draft_steps)
            y = heads.index(r.trial.head) + (s - (len(steps) - 1) / 2) * gap
            low, high = bounds(interval)
            own = colour(heads.index(r.trial.head))
            axis.plot([low, high], [y, y], color=own, linewidth=2)
            axis.plot([interval.value], [y], color=own, marker=marker(s), markersize=6)
            axis.annotate(
                f"{interval.value:.2f}", (high, y), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.margins(x=0.12)
        axis.set_yticks(range(len(heads)), heads)
        axis.set_title(streams(c))
        axis.set_xlabel("speed-up over plain decoding (x, 95% CI)")
    axes[0].set_ylim(len(heads) - 0.5, -0.5)
    legend_below(figure, steps_entries(steps))
    return figure


def load_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Speed-up over plain decoding against the number of streams, with its 95% interval: where it stops paying."""
    results = [r for r in results if r.speedup("plain")]
    heads, steps, concurrencies = values(results)
    if len(concurrencies) < LEAST_LOADS:
        return None
    figure, axes = panels(len(steps), width=5.2, height=3.8, share=True, columns=2)
    for axis, s in zip(axes, steps, strict=True):
        for i, head in enumerate(heads):
            own = sorted(
                (r for r in results if (r.trial.head, r.trial.draft_steps) == (head, s)),
                key=lambda r: r.trial.concurrency,
            )
            intervals = [interval for r in own if (interval := r.speedup("plain"))]
            loads = [r.trial.concurrency for r in own]
            axis.plot(loads, [x.value for x in intervals], color=colour(i), marker=marker(steps.index(s)), markersize=5)
            low, high = zip(*map(bounds, intervals), strict=True) if intervals else ((), ())
            axis.fill_between(loads, low, high, color=colour(i), alpha=0.12, linewidth=0)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(concurrencies, [str(c) for c in concurrencies])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(f"{s} draft step{'s' if s > 1 else ''}")
        axis.set_xlabel("streams")
    axes[0].set_ylabel("speed-up over plain decoding (95% CI)")
    legend_below(figure, head_entries(heads))
    return figure


def pareto_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Throughput against what a user waits for a token; the line joins the trials that no other beats in both."""
    results = [r for r in results if {"tpot_ms_p50", "output_tokens_per_s"} <= set(r.metrics)]
    if len(results) < 2:
        return None
    heads, steps, _ = values(results)
    figure, (axis,) = panels(1, width=7.0, height=4.6)
    best = frontier(results)
    axis.plot(*zip(*map(_latency_and_throughput, best), strict=True), color="0.55", linewidth=1.5, zorder=1)
    for r in results:
        x, y = _latency_and_throughput(r)
        if r.trial.drafter is None:
            axis.plot(x, y, color="black", marker="*", markersize=12, linestyle="none", zorder=2)
        else:
            own, s = colour(heads.index(r.trial.head)), steps.index(r.trial.draft_steps)
            axis.plot(x, y, color=own, marker=marker(s), markersize=7, linestyle="none", alpha=0.9, zorder=2)
    for c in sorted({r.trial.concurrency for r in results}):
        cloud = [_latency_and_throughput(r) for r in results if r.trial.concurrency == c]
        x, y = sum(x for x, _ in cloud) / len(cloud), max(y for _, y in cloud)
        axis.annotate(streams(c), (x, y), (0, 10), textcoords="offset points", ha="center", color="0.35", fontsize=9)
    axis.set_yscale("log")
    axis.set_xscale("log")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda value, _: f"{value:g}")
        one.set_minor_formatter(lambda value, _: f"{value:g}")
        one.set_tick_params(which="both", labelsize=8)
    axis.margins(y=0.15)
    axis.set_xlabel("median time per output token of a request (ms): left is better")
    axis.set_ylabel("output tokens/s of all streams: up is better")
    plain = (Line2D([], [], color="black", marker="*", markersize=10, linestyle="none"), "plain decoding")
    line = (Line2D([], [], color="0.55", linewidth=1.5), "beaten by none in both")
    legend_below(figure, [*head_entries(heads), *steps_entries(steps), plain, line], columns=4)
    return figure


def frontier(results: "Sequence[TrialResult]") -> "list[TrialResult]":
    """The trials that no other beats in both median TPOT and throughput, by increasing TPOT."""
    ordered = sorted(results, key=lambda r: (r.metrics["tpot_ms_p50"], -r.metrics["output_tokens_per_s"]))
    best: list[TrialResult] = []
    for r in ordered:
        if not best or r.metrics["output_tokens_per_s"] > best[-1].metrics["output_tokens_per_s"]:
            best.append(r)
    return best


def category_speedup_figure(speedups: Mapping[str, Mapping[str, Interval]]) -> Figure:
    """Speed-up of some trials over plain decoding by prompt category, {trial: {category: speed-up}}.

    With 95% intervals: red where speculation hurts beyond doubt, grey where the interval includes 1 or there is none.
    """
    names = sorted({name for own in speedups.values() for name in own})
    figure, axes = panels(len(speedups), width=4.6, height=1.2 + 0.27 * len(names), share=True, columns=2)
    for axis, (trial, own) in zip(axes, speedups.items(), strict=True):
        for name, interval in own.items():
            y, tint = names.index(name), {True: colour(0), False: colour(1), None: "0.55"}[beats_one(interval)]
            axis.plot(bounds(interval), [y, y], color=tint, linewidth=2)
            axis.plot([interval.value], [y], color=tint, marker="o", markersize=5)
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.set_yticks(range(len(names)), names)
        axis.set_title(trial)
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
