"""The rules that turn counts into what a head keeps. A new rule is one class, one line here and one test."""

from __future__ import annotations

from typing import Any

from rayspec.calibration.rules.base import Rule
from rayspec.calibration.rules.bcl import Bcl
from rayspec.calibration.rules.bigram import Bigram
from rayspec.calibration.rules.clusters import Contiguous, KMeans
from rayspec.calibration.rules.truncation import FrSpec, VocabTrim
from rayspec.entries import parse

RULES: dict[str, type[Rule]] = {
    "frspec": FrSpec,
    "vocabtrim": VocabTrim,
    "bcl": Bcl,
    "kmeans": KMeans,
    "contiguous": Contiguous,
    "bigram": Bigram,
}


def parse_rule(entry: Any) -> Rule:
    """The checked rule of an entry {kind: ..., options}. Raises ValueError for what it should not hold."""
    return parse(RULES, entry, "rule")
