"""Which tokens follow each other, for SLiM's correlations (sglang_ext.trees.slim)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rayspec.calibration.counting import PairCounts
from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.rules.base import Made, Rule
from rayspec.calibration.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Bigram(Rule):
    """All pairs with their counts: what is made of a pair that was never seen is the tree's choice."""

    kind: ClassVar[str] = "bigram"
    source_kinds: ClassVar[tuple[str, ...]] = ("target", "raw")
    of_pairs: ClassVar[bool] = True

    def make(self, counts_V: PairCounts, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        tensors = {"bigram_indptr": counts_V.indptr, "bigram_ids": counts_V.ids_P, "bigram_counts": counts_V.counts_P}
        once = int((counts_V.counts_P == 1).sum())
        figures = {"pairs": float(len(counts_V.ids_P)), "seen_once": once / len(counts_V.ids_P)}
        return Made(tensors, figures)
