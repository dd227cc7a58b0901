"""How the figures of a sweep show its heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from rayspec.plotting import PALETTE, colour, shortened_apart

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult


@dataclass(frozen=True, kw_only=True)
class DrafterStyles:
    """How the figures of a sweep tell its heads apart, in the sweep's order.

    By colour; where there are more heads than colours, by the colour of their kind and a number in the point. The kind
    is the head's, or where several were measured the algorithm.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, results: "Sequence[TrialResult]") -> Self:
        drafted = {r.trial.label: r.trial.candidate for r in results if r.trial.candidate is not None}
        is_mixed = len({c.algorithm for c in drafted.values()}) > 1
        kinds = {label: c.algorithm if is_mixed else c.head.kind for label, c in drafted.items()}
        return cls(names=tuple(kinds), kinds=tuple(kinds.values()))

    @property
    def short_names(self) -> list[str]:
        return shortened_apart(self.names)

    @property
    def is_crowded(self) -> bool:
        return len(self.names) > len(PALETTE)

    def colour(self, label: str) -> str:
        index = self.names.index(label)
        return colour(list(dict.fromkeys(self.kinds)).index(self.kinds[index]) if self.is_crowded else index)

    def label(self, label: str) -> str:
        """The name in a legend, with its number where points carry it."""
        number = self.names.index(label)
        return f"{number + 1} {self.short_names[number]}" if self.is_crowded else self.short_names[number]

    def point(self, axis: Axes, x: float, y: float, label: str, shape: str, numbered: bool = True) -> None:
        """A marker, with the head's number where colours do not suffice."""
        numbered = numbered and self.is_crowded
        size = 11 if numbered else 7.5
        axis.plot(x, y, color=self.colour(label), marker=shape, markersize=size, linestyle="none", alpha=0.9, zorder=3)
        if numbered:
            number = str(self.names.index(label) + 1)
            axis.annotate(number, (x, y), ha="center", va="center", fontsize=7, color="white", zorder=4)

    def entries(self, only: Sequence[str] | None = None) -> list[tuple[Artist, str]]:
        """Legend entries of all heads, or of some."""
        return [
            (Line2D([], [], color=self.colour(label), linewidth=6, solid_capstyle="butt"), self.label(label))
            for label in self.names
            if only is None or label in only
        ]
