"""Clusters of the vocabulary for heads that score some of them: k-means (DynaSpec) and contiguous groups (CORAL).

`cluster_of` int64 [V]: 0 for the pinned tokens, which every row scores (the stop tokens, and the `pinned` most frequent
others), 1..M for the rest; none of those is empty. V = vocabulary, M = routed clusters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayspec.calibration.drafter import ReferenceDrafter
from rayspec.calibration.rules.base import Made, Rule
from rayspec.calibration.rules.kmeans import ITERATIONS, spherical_kmeans
from rayspec.calibration.rules.ranking import rank
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.config import MAX_SEED
from sglang_ext.settings import require

MAX_ITERATIONS = 100_000


@dataclass(frozen=True, kw_only=True)
class Clusters(Rule):
    """`clusters` is M; `pinned`: how many of the most frequent tokens are pinned beside the stop tokens."""

    clusters: int
    pinned: int = 0

    def __post_init__(self) -> None:
        require(self.clusters >= 1, "clusters", self.clusters, "at least 1")
        require(self.pinned >= 0, "pinned", self.pinned, "at least 0")

    def check(self, vocabulary: Vocabulary) -> None:
        stops = len(vocabulary.stop_ids)
        most = vocabulary.num_usable - stops
        if self.pinned > most:
            raise ValueError(f"rule.pinned must be in 0..{most} (the usable tokens), got {self.pinned}")
        routed = vocabulary.size - stops - self.pinned
        if self.clusters > routed:
            raise ValueError(
                f"rule.clusters must be in 1..{routed} (the tokens that are not pinned), got {self.clusters}"
            )

    def routed_ids(self, counts_V: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Ascending ids of the tokens that are not pinned."""
        return rank(counts_V, vocabulary)[len(vocabulary.stop_ids) + self.pinned :].sort().values


def clustered(vocabulary: Vocabulary, routed: Tensor, labels: Tensor, clusters: int) -> Made:
    cluster_of = torch.zeros(vocabulary.size, dtype=torch.int64)
    cluster_of[routed] = labels + 1
    sizes_M = labels.bincount(minlength=clusters)
    # each list is padded to the largest, so this is what a head reads for every token that it means
    padding = int(sizes_M.max()) * clusters / len(routed)
    figures = {
        "clusters": float(clusters),
        "pinned": float(vocabulary.size - len(routed)),
        "largest": float(sizes_M.max()),
        "smallest": float(sizes_M.min()),
        "padded_over_mean": padding,
    }
    return Made({"cluster_of": cluster_of}, figures)


@dataclass(frozen=True, kw_only=True)
class Contiguous(Clusters):
    """Runs of neighbouring ids whose sizes differ by one at most."""

    kind: ClassVar[str] = "contiguous"

    def make(self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        routed = self.routed_ids(counts_V, vocabulary)
        labels = torch.arange(len(routed)) * self.clusters // len(routed)
        return clustered(vocabulary, routed, labels, self.clusters)


@dataclass(frozen=True, kw_only=True)
class KMeans(Clusters):
    """Spherical k-means of the LM head's rows. `max_size`: the largest cluster as a multiple of the mean, None for no
    limit. `drafter`: whose LM head, None for the target's."""

    kind: ClassVar[str] = "kmeans"
    max_size: float | None = None
    iterations: int = ITERATIONS
    seed: int = 0
    drafter: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_size = self.max_size is None or self.max_size >= 1.0
        require(is_size, "max_size", self.max_size, "at least 1 (the mean size)")
        require(1 <= self.iterations <= MAX_ITERATIONS, "iterations", self.iterations, f"in 1..{MAX_ITERATIONS}")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")

    @property
    def drafter_name(self) -> str | None:
        return self.drafter

    def depends_on(self, drafter: ReferenceDrafter) -> dict[str, Any]:
        return {"head_sha256": drafter.head_sha256}

    def make(self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        routed = self.routed_ids(counts_V, vocabulary)
        capacity = None if self.max_size is None else math.ceil(self.max_size * len(routed) / self.clusters - 1e-9)
        rows = drafter.head_VH[routed]
        found = spherical_kmeans(rows, self.clusters, seed=self.seed, iterations=self.iterations, capacity=capacity)
        made = clustered(vocabulary, routed, found.labels_N, self.clusters)
        made.figures["mean_cosine"] = float(found.cosine_N.mean())
        return made
