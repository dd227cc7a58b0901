"""The figures that a sweep's results give, each left out where its numbers were not measured."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from rayspec.plotting import attempt, save_figures
from rayspec.report.categories import RequestsOf
from rayspec.report.cost_figures import budget_figure, work_figure
from rayspec.report.drafter_styles import DrafterStyles
from rayspec.report.head_figures import (
    acceptance_figure,
    category_figure,
    prediction_figure,
    shortlist_figure,
    tradeoff_figure,
)
from rayspec.report.option_figures import option_figure
from rayspec.report.speed_figures import load_figure, pareto_figure, speedup_figure

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult

MAX_HEADS = 40  # more are not told apart by numbers in points, nor fit into a legend
FIGURES: "dict[str, Callable[[Sequence[TrialResult]], Figure | None]]" = {
    "speedup": speedup_figure,
    "speedup_by_load": load_figure,
    "speedup_by_budget": budget_figure,
    "pareto": pareto_figure,
    "work": work_figure,
    "head_tradeoff": tradeoff_figure,
    "tau_by_shortlist": shortlist_figure,
    "by_option": option_figure,
    "prediction": prediction_figure,
    "acceptance": acceptance_figure,
}


def write_figures(results: "Sequence[TrialResult]", folder: Path, requests: RequestsOf | None = None) -> list[Path]:
    """Write all as PNG and SVG into `folder`; returns their files. Failed trials are left out."""
    return save_figures(sweep_figures(results, requests), folder)


def sweep_figures(results: "Sequence[TrialResult]", requests: RequestsOf | None = None) -> dict[str, Figure]:
    """The figures by name, in the order in which a reader wants them; of very many heads those of the fastest.

    `requests` gives those of a trial, for intervals by category.
    """
    measured = [r for r in results if r.error is None]
    all_heads = DrafterStyles.of(measured).names
    if len(all_heads) > MAX_HEADS:
        measured = _of_the_fastest(measured)
    figures = {name: attempt(name, partial(draw, measured)) for name, draw in FIGURES.items()}
    figures["tau_by_category"] = attempt("tau_by_category", partial(category_figure, measured, requests))
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    if len(all_heads) > MAX_HEADS:
        for figure in drawn.values():
            figure.suptitle(f"the {MAX_HEADS} fastest of {len(all_heads)} heads; the table has all", fontsize=9)
    return drawn


def _of_the_fastest(results: "Sequence[TrialResult]") -> "list[TrialResult]":
    """The trials of the heads with the highest throughput in any trial, and of plain decoding."""
    best: dict[str, float] = {}
    for r in results:
        if r.trial.candidate is not None:
            best[r.trial.label] = max(best.get(r.trial.label, 0.0), r.metrics.get("output_tokens_per_s", 0.0))
    kept = set(sorted(best, key=lambda head: -best[head])[:MAX_HEADS])
    return [r for r in results if r.trial.candidate is None or r.trial.label in kept]
