"""The figures that a sweep's results give, each left out where its numbers were not measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from rayspec.report.head_figures import acceptance_figure, category_figure, prediction_figure, tradeoff_figure
from rayspec.report.speed_figures import load_figure, pareto_figure, speedup_figure
from rayspec.report.style import house_style, save_figures

if TYPE_CHECKING:
    from rayspec.sweep.results import TrialResult


def write_figures(results: "Sequence[TrialResult]", folder: Path) -> list[Path]:
    """Write all as PNG and SVG into `folder`; returns their files. Failed trials are left out."""
    return save_figures(sweep_figures(results), folder)


def sweep_figures(results: "Sequence[TrialResult]") -> dict[str, Figure]:
    """The figures by name, in the order in which a reader wants them."""
    measured = [r for r in results if r.error is None]
    with house_style():
        figures = {
            "speedup": speedup_figure(measured),
            "speedup_by_load": load_figure(measured),
            "pareto": pareto_figure(measured),
            "head_tradeoff": tradeoff_figure(measured),
            "prediction": prediction_figure(measured),
            "acceptance": acceptance_figure(measured),
            "tau_by_category": category_figure(measured),
        }
    return {name: figure for name, figure in figures.items() if figure is not None}
