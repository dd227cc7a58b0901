"""Figures that explain: what a head keeps of acceptance, what it costs, and whether both explain the speed-up."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rayspec.metrics import TAU_CATEGORY, break_even_rho
from rayspec.plotting import counted, legend_below, marker, panels, shortened, steps_entries
from rayspec.report.categories import RequestsOf, category_taus
from rayspec.report.drafter_styles import DrafterStyles
from rayspec.report.point_labels import label_points
from rayspec.report.speed_figures import axes_of, bounds
from rayspec.statistics import Interval

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult

MAX_CATEGORIES = 24  # rows of one figure
FRONT: dict[str, Any] = {"color": "#0072B2", "linewidth": 1.2, "linestyle": ":", "zorder": 2}
ISO_SPEEDUPS = (0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0)


def acceptance_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Left: tau per head and draft steps. Right: share of verify steps that accept at least i drafts.

    Under the lightest traffic: acceptance does not depend on it under greedy decoding.
    """
    results = [r for r in results if r.trial.candidate is not None and "tau" in r.metrics]
    if not results:
        return None
    lightest = min(r.trial.traffic for r in results)
    results = [r for r in results if r.trial.traffic == lightest]
    heads, (steps, _) = DrafterStyles.of(results), axes_of(results)
    figure, (left, *right) = panels(1 + len(steps), width=3.9, height=3.6, columns=3)
    width = 0.8 / len(heads.names)
    for r in results:
        head, s, tau = heads.names.index(r.trial.label), steps.index(r.trial.draft_steps), r.metrics["tau"]
        own, x = heads.colour(r.trial.label), s + (head - (len(heads.names) - 1) / 2) * width
        left.bar(x, tau, width=0.9 * width, color=own, zorder=2)
        text = str(head + 1) if heads.is_crowded else f"{tau:.2f}"
        left.annotate(text, (x, tau), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        positions = list(range(1, r.trial.draft_steps + 1))
        shares = [r.metrics[f"accept_pos_{i}"] for i in positions]
        right[s].plot(positions, shares, color=own, marker=marker(head), markersize=5, clip_on=False)
    left.axhline(1, color="black", linestyle="--", linewidth=1, zorder=3)
    left.set_xticks(range(len(steps)), [str(s) for s in steps])
    left.set_xlabel("draft steps")
    left.set_ylabel("tau (tokens per verify step)")
    left.set_title(f"tau, {lightest}")
    left.set_ylim(0, 1.1 * max(r.metrics["tau"] for r in results))
    left.grid(axis="x", visible=False)
    for axis, s in zip(right, steps, strict=True):
        axis.set_title(f"acceptance, {counted(s)}")
        axis.set_xlabel("draft position i")
        axis.set_xticks(range(1, s + 1))
        axis.set_ylim(0, 1)
    right[0].set_ylabel("share of steps with ≥ i accepted")
    legend_below(figure, heads.entries())
    return figure


def category_figure(results: "Sequence[TrialResult]", requests: RequestsOf | None = None) -> Figure | None:
    """tau by prompt category: a reduced vocabulary loses most on its long tail.

    Under the lightest traffic and the longest draft; of many categories those where the heads differ most. With the
    `requests` of a trial also the prompts of a category and 95% intervals over them.
    """
    results = [r for r in results if categories(r)]
    if not results:
        return None
    lightest, longest = min(r.trial.traffic for r in results), max(r.trial.draft_steps for r in results)
    results = [r for r in results if (r.trial.traffic, r.trial.draft_steps) == (lightest, longest)]
    names = sorted({name for r in results for name in categories(r)})
    if len(names) < 2:
        return None
    taus = {name: [tau for r in results if (tau := categories(r).get(name)) is not None] for name in names}
    if len(names) > MAX_CATEGORIES:
        names = sorted(names, key=lambda n: min(taus[n]) - max(taus[n]))[:MAX_CATEGORIES]
    names.sort(key=lambda n: -max(taus[n]))
    heads = DrafterStyles.of(results)
    figure, (axis,) = panels(1, width=7.5, height=1.4 + len(names) * (0.2 + 0.09 * len(results)))
    counts: dict[str, int] = {}
    for i, r in enumerate(results):
        measured = category_taus(requests(r.trial)) if requests else {}
        shift = 0.7 * ((i + 0.5) / len(results) - 0.5)  # so that heads of equal tau are both seen
        look: dict[str, Any] = {"color": heads.colour(r.trial.label), "marker": marker(i), "markersize": 5}
        for y, name in enumerate(names):
            if name in categories(r):
                own, n = measured.get(name, (Interval(value=categories(r)[name]), None))
                counts |= {name: n} if n else {}
                axis.plot(bounds(own), [y + shift] * 2, color=look["color"], linewidth=1.2)
                axis.plot([own.value], [y + shift], linestyle="none", **look)
    for y in range(1, len(names)):
        axis.axhline(y - 0.5, color="0.85", linewidth=0.8)
    labels = [f"{shortened(name)} (n = {counts[name]})" if name in counts else shortened(name) for name in names]
    axis.set_yticks(range(len(names)), labels)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("tau (tokens per verify step)" + (", 95% CI over the n prompts" if counts else ""))
    axis.set_title(f"tau by prompt category, {lightest}, {counted(longest)}")
    entries = [
        (Line2D([], [], color=heads.colour(head), marker=marker(i), linestyle="none"), short)
        for i, (head, short) in enumerate(zip(heads.names, heads.short_names, strict=True))
    ]
    legend_below(figure, entries, columns=4)
    return figure


def categories(result: "TrialResult") -> dict[str, float]:
    """tau of each prompt category."""
    return {k.removeprefix(TAU_CATEGORY): v for k, v in result.metrics.items() if k.startswith(TAU_CATEGORY)}


def tradeoff_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """tau kept (rho) against head latency (nu), both relative to the baseline, in a panel per traffic and draft steps,
    with names at the points and a line through the heads that no other beats in both.

    Above the thick break-even line a head is faster than the baseline; the thin ones are of equal predicted speed-up.
    The lines need the measured kappa; without it there are none.
    """
    results = [r for r in results if {"nu", "rho"} <= set(r.metrics)]
    if not results:
        return None
    heads, (steps, traffics) = DrafterStyles.of(results), axes_of(results)
    cells = [(traffic, s) for traffic in traffics for s in steps]
    columns = min(3, max(2, len(steps)), len(cells))
    scale = 1.5 if heads.is_crowded else 1.2
    figure, axes = panels(len(cells), width=4.2 * scale, height=3.4 * scale, share=True, columns=columns)
    names: list[list[tuple[float, float, str]]] = []
    rho = [r.metrics["rho"] for r in results]
    low, high = min(rho) - 0.06, max(1.0, *rho) + 0.06
    right = 1.12 * max(1.0, *(r.metrics["nu"] for r in results))
    for k, (axis, (traffic, s)) in enumerate(zip(axes, cells, strict=True)):
        here = [r for r in results if (r.trial.traffic, r.trial.draft_steps) == (traffic, s)]
        kappa = next((r.metrics["kappa"] for r in here if "kappa" in r.metrics), None)
        text = f"{traffic}, {counted(s)}"
        if kappa is not None:
            _speedup_lines(axis, kappa, right, low, high)
            text += f", κ = {kappa:.2f}"
        for r in here:
            x, y = _nu_and_rho(r)
            heads.point(axis, x, y, r.trial.label, marker(steps.index(s)), numbered=False)
        axis.plot(*zip(*unbeaten(list(map(_nu_and_rho, here))), strict=True), **FRONT)
        names.append([(*_nu_and_rho(r), shortened(r.trial.label, 24)) for r in here])
        axis.set_title(text)
        axis.set_xlim(0, right)
        axis.set_ylim(low, high)
        axis.grid(visible=False)
        if k % columns == 0:
            axis.set_ylabel(f"tau relative to {results[0].baseline} (rho)")
        if k >= len(cells) - columns:
            axis.set_xlabel(f"head latency relative to {results[0].baseline} (nu)")
    lines = [
        (Line2D([], [], **FRONT), "beaten by no head in both"),
        (Line2D([], [], color="black", linewidth=1.6), f"break-even with {results[0].baseline}"),
        (Line2D([], [], color="0.6", linewidth=0.8), "equal predicted speed-up"),
    ]
    legend_below(figure, [*steps_entries(steps), *lines], columns=min(3, 1 + columns))
    label_points(axes, names)
    return figure


def shortlist_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """tau kept (rho) against the tokens that the head scored for a row, in a panel per draft steps: methods that choose
    tokens compare at equal mean size. Under the lightest traffic, since tau does not depend on it."""
    results = [r for r in results if {"shortlist_mean", "rho"} <= set(r.metrics)]
    if len({r.metrics["shortlist_mean"] for r in results}) < 2:
        return None
    heads, (steps, traffics) = DrafterStyles.of(results), axes_of(results)
    figure, axes = panels(len(steps), width=4.6, height=3.7, share=True, columns=min(3, len(steps)))
    for axis, s in zip(axes, steps, strict=True):
        for r in results:
            if (r.trial.traffic, r.trial.draft_steps) == (traffics[0], s):
                heads.point(axis, r.metrics["shortlist_mean"], r.metrics["rho"], r.trial.label, marker(steps.index(s)))
        axis.set_title(counted(s))
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel("tokens scored for a row, mean")
    axes[0].set_ylabel(f"tau relative to {results[0].baseline} (rho)")
    legend_below(figure, heads.entries(), columns=4)
    return figure


def unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (latency, acceptance) that no other beats in both, by increasing latency."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def _nu_and_rho(result: "TrialResult") -> tuple[float, float]:
    return result.metrics["nu"], result.metrics["rho"]


def _speedup_lines(axis: Axes, kappa: float, right: float, low: float, high: float) -> None:
    """Break-even and lines of equal predicted speed-up: at speed-up x, rho is x times that of break-even."""
    nu = np.linspace(0, right, 50)
    even = break_even_rho(nu, kappa)
    axis.fill_between(nu, even, high, color="0.5", alpha=0.07, linewidth=0)
    axis.plot(nu, even, color="black", linewidth=1.6, zorder=2)
    for speedup in ISO_SPEEDUPS:
        axis.plot(nu, speedup * even, color="0.6", linewidth=0.8, zorder=1)
        inside = nu[(speedup * even > low) & (speedup * even < high)]
        if len(inside) > len(nu) / 8:  # else there is no room for its name
            x = float(inside[-1])
            axis.annotate(
                f"{speedup:g}x",
                (x, speedup * break_even_rho(x, kappa)),
                (-3, 0),
                textcoords="offset points",
                ha="right",
                va="center" if x < right else "bottom",
                fontsize=7,
                color="0.4",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )


def prediction_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Measured speed-up over the baseline, with its 95% interval, against what rho, nu and kappa predict."""
    # the styles of all results, so that a head keeps its colour
    heads, (steps, _) = DrafterStyles.of(results), axes_of(results)
    results = [r for r in results if not r.is_baseline and prediction_error(r) is not None]
    if not results:
        return None
    traffics = sorted({r.trial.traffic for r in results})
    figure, axes = panels(len(traffics), width=4.2, height=3.8, share=True, columns=3)
    for axis, traffic in zip(axes, traffics, strict=True):
        for r in (r for r in results if r.trial.traffic == traffic):
            interval = r.speedup("baseline")
            assert interval is not None, "filtered above"
            x, head = r.metrics["speedup_vs_baseline_predicted"], r.trial.label
            axis.plot([x, x], bounds(interval), color=heads.colour(head), linewidth=1.5)
            heads.point(axis, x, interval.value, head, marker(steps.index(r.trial.draft_steps)))
        axis.axline((1, 1), slope=1, color="black", linestyle="--", linewidth=1)
        axis.set_title(str(traffic))
        axis.set_xlabel(f"predicted speed-up over {results[0].baseline}")
    axes[0].set_ylabel("measured (95% CI)")
    shown = heads.entries([r.trial.label for r in results])
    legend_below(figure, [*shown, *steps_entries(steps)])
    return figure


def prediction_error(result: "TrialResult") -> float | None:
    """Predicted over measured speed-up over the baseline, minus 1; None where either was not measured."""
    measured, predicted = result.speedup("baseline"), result.metrics.get("speedup_vs_baseline_predicted")
    return predicted / measured.value - 1 if measured and predicted is not None else None
