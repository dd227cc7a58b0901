"""Figures of what a token costs by count, and of how much of a draft to verify."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from rayspec.plotting import colour, legend_below, marker, panels, steps_entries
from rayspec.report.drafter_styles import DrafterStyles
from rayspec.report.speed_figures import axes_of, bounds

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult

MIN_BUDGETS = 3  # of one drafter; fewer are better read from the table


def work_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Tokens of a verify step against GFLOPs of an emitted token, under the lightest traffic."""
    results = [r for r in results if {"tau", "gflops_per_token"} <= set(r.metrics) or r.trial.candidate is None]
    drafted = [r for r in results if r.trial.candidate is not None]
    if len(drafted) < 2:
        return None
    lightest = min(r.trial.traffic for r in drafted)
    heads, (steps, _) = DrafterStyles.of(drafted), axes_of(drafted)
    figure, (axis,) = panels(1, width=7.0, height=4.8)
    for r in (r for r in results if r.trial.traffic == lightest and "gflops_per_token" in r.metrics):
        x = r.metrics["gflops_per_token"]
        if r.trial.candidate is None:
            axis.plot(x, 1.0, color="black", marker="*", markersize=12, linestyle="none", zorder=3)
        else:
            heads.point(axis, x, r.metrics["tau"], r.trial.label, marker(steps.index(r.trial.draft_steps)))
    axis.set_xlabel("GFLOPs per emitted token: left is better")
    axis.set_ylabel("tau (tokens per verify step): up is better")
    axis.set_title(str(lightest))
    axis.margins(0.1)
    plain = (Line2D([], [], color="black", marker="*", markersize=10, linestyle="none"), "plain decoding")
    legend_below(figure, [*heads.entries(), *steps_entries(steps), plain], columns=3)
    return figure


def budget_figure(results: "Sequence[TrialResult]") -> Figure | None:
    """Speed-up over plain decoding against verified tokens of a step, a line for each drafter and draft length that was
    measured in several shapes."""
    lines: dict[tuple[str, int], list[TrialResult]] = {}
    for r in results:
        if r.trial.candidate is not None and r.speedup("plain"):
            lines.setdefault((r.trial.candidate.drafter, r.trial.draft_steps), []).append(r)
    lines = {key: own for key, own in lines.items() if len({_verified(r) for r in own}) >= MIN_BUDGETS}
    if not lines:
        return None
    traffics = sorted({r.trial.traffic for own in lines.values() for r in own})
    figure, axes = panels(len(traffics), width=4.8, height=3.8, share=True, columns=3)
    for axis, traffic in zip(axes, traffics, strict=True):
        for i, own in enumerate(lines.values()):
            here = sorted((r for r in own if r.trial.traffic == traffic), key=_verified)
            intervals = [interval for r in here if (interval := r.speedup("plain"))]
            low, high = zip(*map(bounds, intervals), strict=True)
            budgets = [_verified(r) for r in here]
            axis.plot(budgets, [x.value for x in intervals], color=colour(i), marker=marker(i), linewidth=1.5)
            axis.fill_between(budgets, low, high, color=colour(i), alpha=0.12, linewidth=0)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        axis.set_xscale("log", base=2)
        budgets = sorted({_verified(r) for own in lines.values() for r in own})
        axis.set_xticks(budgets, [str(b) for b in budgets])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_title(str(traffic))
        axis.set_xlabel("verified tokens of a step, with the root")
    axes[0].set_ylabel("speed-up over plain decoding (95% CI)")
    many = len({steps for _, steps in lines}) > 1
    legend_below(
        figure,
        [
            (Line2D([], [], color=colour(i), marker=marker(i)), f"{name}, {steps} draft steps" if many else name)
            for i, (name, steps) in enumerate(lines)
        ],
    )
    return figure


def _verified(result: "TrialResult") -> int:
    return result.trial.drafted.num_draft_tokens
