"""What all figures share: colours and markers, panels, legends, files."""

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Okabe and Ito's palette: distinguishable with every common colour vision deficiency; its yellow is too pale for lines
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
USUAL_LEGEND_ROWS = 3  # the panels' height allows for them
ENTRY_WIDTH, LETTER_WIDTH = 0.6, 0.075  # inches, at the font size of STYLE
DASHES = ("--", ":", "-.", (0, (5, 1)))
# Scripts that matplotlib's own font lacks; those that are not installed are left out
MORE_FONTS: tuple[str, ...] = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Noto Sans Devanagari",
)
MORE_FONTS += ("Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Thai", "FreeSans", "Arial Unicode MS")
STYLE: dict[Any, Any] = {
    "font.family": ["DejaVu Sans", *(f for f in MORE_FONTS if f in set(font_manager.get_font_names()))],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "text.parse_math": False,  # a name may hold $ or a backslash
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
    """One legend below all panels, which keep their size under a long one; of fewer `columns` where they do not fit."""
    handles, labels = zip(*entries, strict=True)
    columns = min(columns, max(1, int(figure.get_figwidth() / (ENTRY_WIDTH + LETTER_WIDTH * max(map(len, labels))))))
    rows = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + 0.22 * max(0, rows - USUAL_LEGEND_ROWS))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, len(entries)))


def steps_entries(steps: Iterable[int]) -> list[tuple[Artist, str]]:
    """Legend entries that tell draft steps by marker."""
    return [(Line2D([], [], color="0.35", marker=marker(i), linestyle="none"), counted(s)) for i, s in enumerate(steps)]


def shortened(name: str, limit: int = 30) -> str:
    """A name for a figure, which has little room: of a longer one the beginning and the end."""
    return name if len(name) <= limit else f"{name[: limit - 11]}…{name[-10:]}"


def shortened_apart(names: Sequence[str]) -> list[str]:
    """Unlike names for a figure, shortened so far that they stay unlike."""
    limit = 30
    while len(set(short := [shortened(name, limit) for name in names])) < len(set(names)):
        limit += 10
    return short


def counted(draft_steps: int) -> str:
    return f"{draft_steps} draft step{'s' if draft_steps > 1 else ''}"


@contextlib.contextmanager
def house_style() -> Iterator[None]:
    """Figures made inside look alike."""
    with plt.rc_context(STYLE):
        yield


def attempt(name: str, draw: Callable[[], T]) -> T | None:
    """What `draw` gives in the house style; None, with a warning, where it fails: a figure is not worth a sweep."""
    try:
        with house_style():
            return draw()
    except Exception as error:  # matplotlib and its libraries have an exception for each
        logger.warning("figure %s could not be drawn and is left out: %s: %s", name, type(error).__name__, error)
        return None


def save_figures(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """Write each as <name>.png (to look at) and <name>.svg (to keep), and close it; returns the files.

    A figure that cannot be drawn is left out, with a warning.
    """
    return [file for name in figures for file in attempt(name, partial(_save, figures[name], folder / name)) or ()]


def _save(figure: Figure, path: Path) -> list[Path]:
    png, svg = (path.with_name(path.name + suffix) for suffix in (".png", ".svg"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a warning a character
            figure.savefig(png, dpi=150)
            figure.set_layout_engine("none")  # the places that were found stay
            figure.savefig(svg, metadata={"Date": None})  # the same numbers give the same file
    except Exception:  # whatever a figure fails of, no half-written picture stays
        png.unlink(missing_ok=True)
        raise
    finally:
        plt.close(figure)
    return [png, svg]
