"""The sweep's figures, each as PNG (to look at) and SVG (to keep): speed-up, acceptance, and the head trade-off."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from rayspec.farm.load import Traffic
from rayspec.metrics import break_even_rho, category_key
from rayspec.report.style import (
    DASHES,
    PALETTE,
    STYLE,
    colour,
    head_entries,
    legend_below,
    marker,
    panels,
    plt,
    steps_entries,
    title,
)

if TYPE_CHECKING:
    from rayspec.sweep.results import TrialResult


MOST_CATEGORIES = 8


def write_figures(results: "Sequence[TrialResult]", folder: Path) -> list[Path]:
    """Write those figures whose numbers were measured; returns their files. Failed trials are left out."""
    drafted = [r for r in results if r.trial.drafter is not None and r.error is None]
    with plt.rc_context(STYLE):
        figures = {
            "speedup": speedup_figure([r for r in drafted if r.speedup("plain")]),
            "acceptance": acceptance_figure([r for r in drafted if "tau" in r.metrics]),
            "tau_by_category": category_figure([r for r in drafted if _categories(r)]),
            "head_tradeoff": tradeoff_figure([r for r in drafted if {"nu", "rho"} <= set(r.metrics)]),
        }
        files: list[Path] = []
        for name, figure in figures.items():
            if figure is not None:
                files += [folder / f"{name}.png", folder / f"{name}.svg"]
                figure.savefig(files[-2], dpi=150)
                figure.savefig(files[-1], metadata={"Date": None})  # the same numbers give the same file
                plt.close(figure)
    return files


def speedup_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Throughput over plain decoding with its 95% interval: a panel per traffic, a row per head."""
    if not results:
        return None
    heads, steps, traffics = _values(results)
    height = 1.3 + 0.3 * len(heads) * max(2, len(steps))
    figure, axes = panels(len(traffics), width=4.2, height=height, share=True)
    gap = 0.6 / len(steps)
    for axis, traffic in zip(axes, traffics, strict=True):
        for r in (r for r in results if r.trial.traffic == traffic):
            interval = r.speedup("plain")
            assert interval is not None, "filtered by the caller"
            s = steps.index(r.trial.draft_steps)
            y = heads.index(r.trial.head) + (s - (len(steps) - 1) / 2) * gap
            low = interval.value if interval.low is None else interval.low
            high = interval.value if interval.high is None else interval.high
            own = colour(heads.index(r.trial.head))
            axis.plot([low, high], [y, y], color=own, linewidth=2)
            axis.plot([interval.value], [y], color=own, marker=marker(s), markersize=6)
            axis.annotate(
                f"{interval.value:.2f}", (high, y), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.margins(x=0.12)
        axis.set_yticks(range(len(heads)), heads)
        axis.set_title(title(traffic))
        axis.set_xlabel("speed-up over plain decoding (x, 95% CI)")
    axes[0].set_ylim(len(heads) - 0.5, -0.5)
    legend_below(figure, steps_entries(steps))
    return figure


def acceptance_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Left: tau per head and draft steps. Right: share of verify steps that accept at least i drafts.

    Under the lightest traffic: acceptance does not depend on it under greedy decoding.
    """
    if not results:
        return None
    lowest = min(r.trial.traffic for r in results)
    results = [r for r in results if r.trial.traffic == lowest]
    heads, steps, _ = _values(results)
    figure, (left, *right) = panels(1 + len(steps), width=3.7, height=3.6)
    width = 0.8 / len(heads)
    for r in results:
        head, s, tau = heads.index(r.trial.head), steps.index(r.trial.draft_steps), r.metrics["tau"]
        x = s + (head - (len(heads) - 1) / 2) * width
        left.bar(x, tau, width=0.9 * width, color=colour(head), zorder=2)
        left.annotate(f"{tau:.2f}", (x, tau), (0, 2), textcoords="offset points", ha="center", fontsize=8)
        positions = list(range(1, r.trial.draft_steps + 1))
        shares = [r.metrics[f"accept_pos_{i}"] for i in positions]
        right[s].plot(positions, shares, color=colour(head), marker=marker(head), markersize=5, clip_on=False)
    left.axhline(1, color="black", linestyle="--", linewidth=1, zorder=3)
    left.set_xticks(range(len(steps)), [str(s) for s in steps])
    left.set_xlabel("draft steps")
    left.set_ylabel("tau (tokens per verify step)")
    left.set_title(f"tau, {title(lowest)}")
    left.set_ylim(0, 1.1 * max(r.metrics["tau"] for r in results))
    left.grid(axis="x", visible=False)
    for axis, s in zip(right, steps, strict=True):
        axis.set_title(f"acceptance, {s} draft steps")
        axis.set_xlabel("draft position i")
        axis.set_xticks(range(1, s + 1))
        axis.set_ylim(0, 1)
    right[0].set_ylabel("share of steps with ≥ i accepted")
    legend_below(figure, head_entries(heads))
    return figure


def category_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """tau of each prompt category relative to the full head's: a reduced vocabulary loses most on its long tail.

    Under the lightest traffic and the longest draft. Nothing is shown of a workload of one category, or of so many
    that each has few prompts and the differences are noise.
    """
    lowest = min((r.trial.traffic for r in results), default=Traffic(concurrency=1))
    longest = max((r.trial.draft_steps for r in results), default=0)
    results = [r for r in results if (r.trial.traffic, r.trial.draft_steps) == (lowest, longest)]
    full = next((r for r in results if r.is_baseline), None)
    if full is None or not 2 <= len(_categories(full)) <= MOST_CATEGORIES:
        return None
    names = sorted(_categories(full))
    heads = [r.trial.head for r in results]
    figure, (axis,) = panels(1, width=7.5, height=1.5 + 0.28 * len(heads))
    for i, name in enumerate(names):
        shares = [_categories(r).get(name, np.nan) / _categories(full)[name] for r in results]
        axis.plot(shares, range(len(heads)), color=colour(i), marker=marker(i), linestyle="none", label=name)
    axis.axvline(1, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(heads)), heads)
    axis.set_ylim(len(heads) - 0.5, -0.5)
    axis.set_xlabel("tau relative to the full head on the same category")
    axis.set_title(f"{title(lowest)}, {longest} draft steps")
    legend_below(figure, list(zip(*axis.get_legend_handles_labels(), strict=True)))
    return figure


def _categories(result: "TrialResult") -> dict[str, float]:
    prefix = category_key("")
    return {k.removeprefix(prefix): v for k, v in result.metrics.items() if k.startswith(prefix)}


def tradeoff_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """tau kept against head latency, both relative to the full head; above its curve a head is faster than full.

    The curve needs the measured kappa; without it there is none.
    """
    if not results:
        return None
    heads, steps, traffics = _values(results)
    is_crowded = len(heads) > len(PALETTE)  # then colours tell kinds, and numbers heads
    kinds = list(dict.fromkeys(_kind(r) for r in results))
    kind_of = {r.trial.head: kinds.index(_kind(r)) for r in results}
    figure, axes = panels(
        len(traffics), width=6.4 if is_crowded else 4.4, height=5.6 if is_crowded else 4.0, share=True
    )
    nu = np.linspace(0, 1.05 * max(1.0, *(r.metrics["nu"] for r in results)), 100)
    for axis, traffic in zip(axes, traffics, strict=True):
        here = [r for r in results if r.trial.traffic == traffic]
        for i, s in enumerate(steps):
            kappa = next((r.metrics["kappa"] for r in here if r.trial.draft_steps == s and "kappa" in r.metrics), None)
            if kappa is not None:
                label = f"break-even, {s} steps (κ = {kappa:.2f})"
                axis.plot(nu, break_even_rho(nu, kappa), color="0.2", linewidth=1, linestyle=DASHES[i % 4], label=label)
        for r in here:
            head, s, point = (
                heads.index(r.trial.head),
                steps.index(r.trial.draft_steps),
                (r.metrics["nu"], r.metrics["rho"]),
            )
            own = colour(kind_of[r.trial.head] if is_crowded else head)
            axis.plot(*point, color=own, marker=marker(s), markersize=11 if is_crowded else 8, alpha=0.9)
            if is_crowded:
                axis.annotate(str(head + 1), point, ha="center", va="center", fontsize=7, color="white")
        axis.set_title(f"{title(traffic)} (above its line: faster than full)")
        axis.set_xlabel("head latency relative to full (nu)")
        axis.set_xlim(0, None)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("tau relative to full (rho)")
    names = [f"{i} {head}" for i, head in enumerate(heads, start=1)] if is_crowded else heads
    legend_below(
        figure, [*head_entries(names, [kind_of[h] for h in heads] if is_crowded else None), *steps_entries(steps)]
    )
    return figure


def _kind(result: "TrialResult") -> str:
    assert result.trial.drafter is not None, "filtered by the caller"
    return str(result.trial.drafter.head.get("kind"))


def _values(results: "Sequence[TrialResult]") -> tuple[list[str], list[int], list[Traffic]]:
    """Heads in the sweep's order, draft steps and traffics in increasing order."""
    heads = list(dict.fromkeys(r.trial.head for r in results))
    return heads, sorted({r.trial.draft_steps for r in results}), sorted({r.trial.traffic for r in results})
