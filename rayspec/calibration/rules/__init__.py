"""The rules that turn counts into what a head keeps. A new rule is one class, one line here and one test."""

from __future__ import annotations

from rayspec.calibration.rules.base import Rule
from rayspec.calibration.rules.bcl import Bcl
from rayspec.calibration.rules.bigram import Bigram
from rayspec.calibration.rules.clusters import Contiguous, KMeans
from rayspec.calibration.rules.truncation import FrSpec, VocabTrim

RULES: dict[str, type[Rule]] = {
    "frspec": FrSpec,
    "vocabtrim": VocabTrim,
    "bcl": Bcl,
    "kmeans": KMeans,
    "contiguous": Contiguous,
    "bigram": Bigram,
}
