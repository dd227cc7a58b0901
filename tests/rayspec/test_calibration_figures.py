"""The figures show what was chosen, and are not blank."""

import io

import numpy as np
import torch
from PIL import Image

from rayspec.calibration.figures import cluster_sizes_figure, coverage_figure, png, utility_figure


def is_drawn(content: bytes) -> bool:
    with Image.open(io.BytesIO(content)) as image:
        return image.width > 600 and len(image.convert("L").getcolors() or []) > 10


def test_coverage_has_a_line_a_source_and_marks_the_choice() -> None:
    curves = {name: 1 - 0.9 ** torch.arange(1, 101).double() for name in ("raw", "target")}
    figure = coverage_figure(curves, "target", 40)
    (covered,) = figure.axes
    assert covered.get_xscale() == "log"
    legend = covered.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["raw", "target"]
    marked = covered.lines[2].get_xydata()
    assert marked[0].tolist() == [40, float(curves["target"][39])]
    assert covered.texts[0].get_text() == f"k = 40: {marked[0][1]:.1%}"
    assert is_drawn(png(figure))


def test_coverage_of_everything_can_be_drawn() -> None:
    assert is_drawn(png(coverage_figure({"raw": torch.linspace(0.1, 1, 10).double()}, "raw", 10)))


def test_utility_leaves_out_what_may_not_be_chosen() -> None:
    utility_V = torch.linspace(0.2, 0.6, 50).double()
    utility_V[:20] = float("-inf")
    figure = utility_figure(utility_V, torch.linspace(0, 1, 50), torch.linspace(0.3, 1, 50), 0.4, 50)
    drawn = np.asarray(figure.axes[0].lines[0].get_ydata())
    assert np.isnan(drawn[:20]).all()
    assert np.isfinite(drawn[20:]).all()
    assert is_drawn(png(figure))


def test_cluster_sizes_count_every_routed_token() -> None:
    cluster_of_V = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])
    figure = cluster_sizes_figure(cluster_of_V, torch.arange(10))
    sizes, mass = figure.axes
    assert sum(patch.get_height() for patch in sizes.patches) == 3
    assert np.isclose(np.asarray(mass.lines[0].get_ydata())[-1], 1.0)  # token 0, the only pinned one, was never counted
    assert is_drawn(png(figure))


def test_same_numbers_give_the_same_bytes() -> None:
    first, second = (png(cluster_sizes_figure(torch.tensor([0, 1, 2, 2]), torch.arange(4))) for _ in range(2))
    assert first == second
