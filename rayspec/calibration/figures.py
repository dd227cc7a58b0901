"""The figures of a calibration, as PNG bytes: what its vocabulary covers, why BCL chose it, how large clusters are."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from rayspec.plotting import DASHES, STYLE, colour, panels, plt


def coverage_figure(curves: Mapping[str, Tensor], chosen: str, size: int) -> Figure:
    """Share of held-out answer tokens among the first k ids, for every k [V]; a line a source.

    `chosen`: the source whose first `size` ids were kept.
    """
    with plt.rc_context(STYLE):
        figure, (axis,) = panels(1, width=5.6, height=3.8)
        for i, (name, curve_V) in enumerate(curves.items()):
            style = ("-", *DASHES)[i % 5]
            axis.plot(np.arange(1, len(curve_V) + 1), curve_V, label=name, color=colour(i), linestyle=style)
        share = float(curves[chosen][size - 1])
        axis.plot([size], [share], color=colour(list(curves).index(chosen)), marker="o", markersize=7, zorder=3)
        _sizes_axis(axis, len(curves[chosen]), size, f"k = {size}: {share:.1%}")
        axis.set(title="Held-out answer tokens covered", ylabel="share of tokens")
        axis.legend(title="counted on", loc="upper left", fontsize=9)
    return figure


def utility_figure(
    utility_V: Tensor, coverage_V: Tensor, flops_share_V: Tensor, min_coverage: float, size: int
) -> Figure:
    """BCL's utility of every size with its two terms; a size that may not be chosen has no utility (-inf)."""
    with plt.rc_context(STYLE):
        figure, (axis,) = panels(1, width=5.6, height=3.8)
        sizes = np.arange(1, len(utility_V) + 1)
        axis.plot(sizes, torch.where(utility_V.isfinite(), utility_V, torch.nan), color=colour(0), label="utility U(k)")
        axis.plot(sizes, coverage_V, color=colour(1), linestyle="--", label="coverage")
        axis.plot(sizes, flops_share_V, color=colour(2), linestyle="-.", label="FLOPs(k) / FLOPs(V)")
        axis.axhline(min_coverage, color=colour(1), linewidth=0.8, alpha=0.6, label="least coverage")
        best = float(utility_V[size - 1])
        axis.plot([size], [best], color=colour(0), marker="o", markersize=7, zorder=3)
        _sizes_axis(axis, len(utility_V), size, f"k = {size}: U = {best:.3f}")
        axis.set_title("BCL: size of the draft vocabulary")
        axis.legend(fontsize=9, loc="center left")
    return figure


def _sizes_axis(axis: Axes, vocab_size: int, size: int, text: str) -> None:
    """Sizes on a logarithmic scale, the chosen one marked and named at the bottom, where no curve is."""
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.set(xlabel="tokens kept (k)", xlim=(1, vocab_size), ylim=(0, 1.02))
    axis.axvline(size, color="0.4", linestyle=":", linewidth=1)
    is_right = size**2 > vocab_size
    axis.annotate(
        text, (size, 0.03), (-5 if is_right else 5, 0), textcoords="offset points", ha="right" if is_right else "left"
    )


def cluster_sizes_figure(cluster_of_V: Tensor, counts_V: Tensor) -> Figure:
    """Left: sizes of the routed clusters. Right: the share of the counted tokens in each, the largest first."""
    sizes = cluster_of_V.bincount()[1:].numpy()
    mass = np.bincount(cluster_of_V.numpy(), weights=counts_V.numpy(), minlength=len(sizes) + 1) / int(counts_V.sum())
    with plt.rc_context(STYLE):
        figure, (left, right) = panels(2, width=4.4, height=3.4)
        left.hist(sizes, bins=min(40, max(5, len(np.unique(sizes)))), color=colour(0))
        left.axvline(sizes.mean(), color="black", linestyle="--", linewidth=1, label=f"mean {sizes.mean():.0f}")
        left.axvline(sizes.max(), color=colour(1), linestyle=":", linewidth=1.5, label=f"largest {sizes.max()}")
        left.set(title=f"Sizes of {len(sizes)} clusters", xlabel="tokens in the cluster", ylabel="clusters")
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        left.legend(fontsize=9)
        right.plot(np.arange(1, len(sizes) + 1), np.cumsum(np.sort(mass[1:])[::-1]), color=colour(0), label="clusters")
        right.axhline(mass[0], color=colour(2), linestyle="--", linewidth=1.5, label=f"pinned tokens: {mass[0]:.1%}")
        right.set(title="Counted tokens", xlabel="clusters, the most used first", ylabel="share of tokens", ylim=(0, 1))
        right.legend(fontsize=9, loc="center right")
    return figure


def png(figure: Figure) -> bytes:
    """Closes the figure."""
    buffer = io.BytesIO()
    # no software name in the file, so that the same numbers give the same bytes
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()
