"""What every rule is. V = vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.vocabulary import Vocabulary
from sglang_ext.settings import Settings


class Made(NamedTuple):
    """Tensors by the names that a head's `from_target` takes, and what is worth knowing about them."""

    tensors: dict[str, Tensor]
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Rule(Settings, ABC):
    """`source_kinds`: what may be counted for it; `of_pairs`: whether it is made of pairs of neighbouring tokens."""

    kind: ClassVar[str]
    source_kinds: ClassVar[tuple[str, ...]] = ("raw", "target", "draft", "draft_text")
    of_pairs: ClassVar[bool] = False

    @property
    def drafter_name(self) -> str | None:
        """The drafter that the rule looks at, where it was given one; see `ReferenceDrafter`."""
        return None

    def depends_on(self, drafter: ReferenceDrafter) -> dict[str, Any]:
        """What decides the result beside the counts and the rule's own options, as JSON values."""
        return {}

    def check(self, vocabulary: Vocabulary) -> None:  # most rules fit every vocabulary
        """Raise ValueError, before anything is counted, for an option that does not fit the vocabulary."""

    @abstractmethod
    def make(self, counts_V: Any, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        """Apply the rule to counts int64 [V], or to PairCounts where it is `of_pairs`."""

    def pictures(
        self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter, made: Made
    ) -> dict[str, bytes]:
        """PNG files by name, of what this rule alone weighs; most have none."""
        return {}
