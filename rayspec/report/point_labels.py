"""Names beside the points of a scatter plot, placed so that they cover neither points nor each other."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

MARKER_POINTS = 5.0  # half a marker's width
DISTANCES = (7.0, 16.0, 28.0, 42.0)  # of a label from its point, in typographic points
LINE_FROM = 10.0  # a label further away than this is joined to its point
CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.75}  # behind text that meets a line
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
ALIGN = {1: ("left", "bottom"), 0: ("center", "center"), -1: ("right", "top")}


def label_points(axes: Sequence[Axes], points: Sequence[Sequence[tuple[float, float, str]]]) -> None:
    """Write the text of every (x, y, text) of each of the axes, which belong to one figure and have their limits."""
    figure = axes[0].get_figure(root=True)
    assert figure is not None, "axes of a figure"
    figure.draw_without_rendering()  # fixes where the axes are
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]  # Agg has it
    pixels = figure.dpi / 72
    for axis, own in zip(axes, points, strict=True):
        room = axis.get_window_extent(renderer)
        half = MARKER_POINTS * pixels
        places = axis.transData.transform(np.array([(x, y) for x, y, _ in own]).reshape(-1, 2))
        taken = [Bbox.from_extents(px - half, py - half, px + half, py + half) for px, py in places]
        for x, y, text in own:
            label = axis.annotate(text, (x, y), (0, 0), textcoords="offset points", fontsize=7, zorder=5, bbox=CLEAR)
            label.set_in_layout(False)
            best, least = None, np.inf
            for distance, (right, up) in product(DISTANCES, DIRECTIONS):
                if least < 1e-6:
                    break  # nothing is covered: no later place is better
                step = distance / np.hypot(right, up)
                label.set_position((step * right, step * up))
                label.set(ha=ALIGN[right][0], va=ALIGN[up][1])
                box = label.get_window_extent(renderer)
                inside = Bbox.intersection(room, box)
                outside = box.width * box.height - (inside.width * inside.height if inside else 0.0)
                covered = sum(c.width * c.height for other in taken if (c := Bbox.intersection(box, other)))
                if covered + outside < least - 1e-6:
                    best, least = (
                        (step * right, step * up, ALIGN[right][0], ALIGN[up][1], distance, box),
                        covered + outside,
                    )
            assert best is not None, "the first place is better than none"
            label.set_position(best[:2])
            label.set(ha=best[2], va=best[3])
            taken.append(best[5])
            if best[4] > LINE_FROM:
                line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
                joined = axis.annotate("", (x, y), best[:2], textcoords="offset points", arrowprops=line, zorder=2)
                joined.set_in_layout(False)
