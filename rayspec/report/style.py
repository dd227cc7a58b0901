"""What the figures share: colours, panels, legends."""

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rayspec.farm.load import Traffic

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


def panels(count: int, *, width: float, height: float, share: bool = False) -> tuple[Figure, list[Axes]]:
    """A row of `count` axes of `width` x `height` inches each; `share` gives them the same scales."""
    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), sharex=share, sharey=share, squeeze=False, layout="constrained"
    )
    return figure, list(axes[0])


def legend_below(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> None:
    """One legend below all panels."""
    handles, labels = zip(*entries, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(entries)))


def head_entries(heads: Sequence[str], colours: Sequence[int] | None = None) -> list[tuple[Artist, str]]:
    """Legend entries that tell heads by colour; `colours` are the places in the palette, their order's without."""
    numbers = range(len(heads)) if colours is None else colours
    return [
        (Line2D([], [], color=colour(i), linewidth=6, solid_capstyle="butt"), head)
        for i, head in zip(numbers, heads, strict=True)
    ]


def steps_entries(steps: Iterable[int]) -> list[tuple[Artist, str]]:
    """Legend entries that tell draft steps by marker."""
    return [
        (Line2D([], [], color="0.35", marker=marker(i), linestyle="none"), f"{s} draft steps")
        for i, s in enumerate(steps)
    ]


def title(traffic: Traffic) -> str:
    """Of a panel: `1 stream`, `4 streams`, `2.5 requests/s`."""
    if traffic.is_open:
        return str(traffic)
    return f"{traffic.concurrency} stream{'s' if traffic.concurrency > 1 else ''}"
