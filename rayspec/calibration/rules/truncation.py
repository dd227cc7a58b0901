"""The most frequent tokens: FR-Spec (Zhao et al. 2025) on raw text, VocabTrim (Goel et al. 2025) on any source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.rules.base import Made, Rule
from rayspec.calibration.rules.ranking import check_size, coverage, rank
from rayspec.calibration.vocabulary import Vocabulary
from sglang_ext.settings import require


def kept(counts_V: Tensor, ids_k: Tensor) -> Made:
    return Made({"ids": ids_k}, {"k": len(ids_k), "coverage": float(coverage(counts_V, ids_k)[-1])})


@dataclass(frozen=True, kw_only=True)
class FrSpec(Rule):
    """The `top_k` most frequent tokens of raw text."""

    kind: ClassVar[str] = "frspec"
    source_kinds: ClassVar[tuple[str, ...]] = ("raw",)
    top_k: int

    def __post_init__(self) -> None:
        require(self.top_k >= 1, "top_k", self.top_k, "at least 1")

    def check(self, vocabulary: Vocabulary) -> None:
        check_size(self.top_k, vocabulary, "rule.top_k")

    def make(self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        return kept(counts_V, rank(counts_V, vocabulary)[: self.top_k])


@dataclass(frozen=True, kw_only=True)
class VocabTrim(Rule):
    """Exactly one of: `top_k` tokens; the fewest that make up the share `top_p` of the usable tokens counted; those
    counted at least `min_count` times. Stop tokens are kept beside them."""

    kind: ClassVar[str] = "vocabtrim"
    top_k: int | None = None
    top_p: float | None = None
    min_count: int | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("top_k", "top_p", "min_count") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"kind 'vocabtrim' needs exactly one of top_k, top_p and min_count, got {given or 'none'}")
        require(self.top_p is None or 0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        for name in ("top_k", "min_count"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1")

    def check(self, vocabulary: Vocabulary) -> None:
        if self.top_k is not None:
            check_size(self.top_k, vocabulary, "rule.top_k")

    def make(self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        ids_V = rank(counts_V, vocabulary)
        if self.top_k is not None:
            return kept(counts_V, ids_V[: self.top_k])
        stops, usable = len(vocabulary.stop_ids), counts_V[ids_V[: vocabulary.num_usable]]
        if self.top_p is not None:
            share = usable.cumsum(0).double() / max(1, int(usable.sum()))
            size = int((share < self.top_p).sum()) + 1
        else:
            assert self.min_count is not None, "checked on construction"
            size = stops + int((usable[stops:] >= self.min_count).sum())
        return kept(counts_V, ids_V[: max(stops, min(size, len(usable)))])
