"""What the figures share: colours, panels, legends."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

# Okabe and Ito's palette: distinguishable with every common colour vision deficiency; its yellow is too pale for lines
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("--", ":", "-.", (0, (5, 1)))
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "rayspec",
}


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def panels(
    count: int, *, width: float, height: float, share: bool = False, columns: int = 4
) -> tuple[Figure, list[Axes]]:
    """`count` axes of `width` x `height` inches each in rows of `columns`; `share` gives them the same scales."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        sharex=share,
        sharey=share,
        squeeze=False,
        layout="constrained",
    )
    for unused in axes.flat[count:]:
        unused.remove()
    return figure, list(axes.flat[:count])


def legend_below(figure: Figure, entries: Sequence[tuple[Artist, str]], columns: int = 6) -> None:
    """One legend below all panels."""
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(entries)))


def head_entries(heads: Iterable[str]) -> list[tuple[Artist, str]]:
    """Legend entries that tell heads by colour."""
    return [(Line2D([], [], color=colour(i), linewidth=6, solid_capstyle="butt"), head) for i, head in enumerate(heads)]


def steps_entries(steps: Iterable[int]) -> list[tuple[Artist, str]]:
    """Legend entries that tell draft steps by marker."""
    return [
        (Line2D([], [], color="0.35", marker=marker(i), linestyle="none"), f"{s} draft step{'s' if s > 1 else ''}")
        for i, s in enumerate(steps)
    ]


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Figures made inside look alike."""
    with plt.rc_context(STYLE):
        yield


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each as <name>.png (to look at) and <name>.svg (to keep), and close it; returns the files."""
    files: list[Path] = []
    with house_style():
        for name, figure in figures.items():
            png, svg = folder / f"{name}.png", folder / f"{name}.svg"
            figure.savefig(png, dpi=150)
            figure.savefig(svg, metadata={"Date": None})  # the same numbers give the same file
            plt.close(figure)
            files += [png, svg]
    return files


def streams(concurrency: int) -> str:
    return f"{concurrency} stream{'s' if concurrency > 1 else ''}"
