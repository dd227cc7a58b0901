"""BCL: the size of the draft vocabulary as a trade of coverage against the drafter's cost.

Maximise U(k) = w Coverage(k) + (1 - w) (1 - FLOPs(k) / FLOPs(V)) subject to Coverage(k) >= c_min, where Coverage(k) is
the share of assistant tokens among the k most frequent ones and FLOPs(k) counts the whole drafter, its body and k rows
of the head. The paper searches k with Optuna's TPE in 100 calls; k is one number, so a scan of all of them is exact
and the default. V = vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayspec.calibration.drafter import DrafterFlops, ReferenceDrafter
from rayspec.calibration.figures import png, utility_figure
from rayspec.calibration.rules.base import Made, Rule
from rayspec.calibration.rules.ranking import coverage, rank
from rayspec.calibration.rules.truncation import kept
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.config import MAX_SEED
from sglang_ext.settings import require

SEARCHES = ("scan", "tpe")
MAX_CALLS = 100_000


@dataclass(frozen=True, kw_only=True)
class Bcl(Rule):
    """`weight` is w, `min_coverage` c_min (neither was published); `search` is scan or tpe with `calls` trials.
    `drafter`: whose FLOPs count; None for one shaped like the target."""

    kind: ClassVar[str] = "bcl"
    source_kinds: ClassVar[tuple[str, ...]] = ("target",)  # answer tokens alone
    weight: float = 0.5
    min_coverage: float = 0.9
    search: str = "scan"
    calls: int = 100
    seed: int = 0
    drafter: str | None = None

    def __post_init__(self) -> None:
        for name in ("weight", "min_coverage"):
            require(0.0 <= getattr(self, name) <= 1.0, name, getattr(self, name), "in 0..1")
        require(self.search in SEARCHES, "search", self.search, f"one of {', '.join(SEARCHES)}")
        require(1 <= self.calls <= MAX_CALLS, "calls", self.calls, f"in 1..{MAX_CALLS}")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")

    @property
    def drafter_name(self) -> str | None:
        return self.drafter

    def depends_on(self, drafter: ReferenceDrafter) -> dict[str, Any]:
        return {"body_flops": drafter.flops.body, "flops_per_row": drafter.flops.per_row}

    def make(self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter) -> Made:
        utility_V = self.utility(counts_V, vocabulary, drafter.flops)
        if self.search == "scan":
            size = int(utility_V.argmax()) + 1  # the smallest of equals
        else:
            size = search_tpe(utility_V, calls=self.calls, seed=self.seed)
        made = kept(counts_V, rank(counts_V, vocabulary)[:size])
        made.figures["utility"] = float(utility_V[size - 1])
        made.figures["flops_share"] = float(drafter.flops.share(size, vocabulary.size))
        return made

    def pictures(
        self, counts_V: Tensor, vocabulary: Vocabulary, drafter: ReferenceDrafter, made: Made
    ) -> dict[str, bytes]:
        utility_V = self.utility(counts_V, vocabulary, drafter.flops)
        sizes = torch.arange(1, len(utility_V) + 1).double()
        share_V = torch.as_tensor(drafter.flops.share(sizes, vocabulary.size))
        covered_V, size = coverage(counts_V, rank(counts_V, vocabulary)), len(made.tensors["ids"])
        return {"utility.png": png(utility_figure(utility_V, covered_V, share_V, self.min_coverage, size))}

    def utility(self, counts_V: Tensor, vocabulary: Vocabulary, flops: DrafterFlops) -> Tensor:
        """Float64 [V]: U(1), U(2), ... U(V); -inf for a size that no head may have or that covers too little."""
        covered_V = coverage(counts_V, rank(counts_V, vocabulary))
        sizes_V = torch.arange(1, vocabulary.size + 1, dtype=torch.float64)
        utility_V = self.weight * covered_V + (1 - self.weight) * (1 - flops.share(sizes_V, vocabulary.size))
        refused_V = (covered_V < self.min_coverage) | (sizes_V < len(vocabulary.stop_ids))
        refused_V |= (sizes_V > vocabulary.num_usable) & (sizes_V < vocabulary.size)
        return utility_V.masked_fill(refused_V, float("-inf"))


def search_tpe(utility_V: Tensor, *, calls: int, seed: int) -> int:
    """The size with the largest utility that Optuna's TPE finds in `calls` trials, among those that are allowed."""
    import optuna  # seconds of import, and only here

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    allowed = utility_V.isfinite().nonzero().squeeze(1) + 1
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(
        lambda trial: float(utility_V[int(allowed[trial.suggest_int("place", 0, len(allowed) - 1)]) - 1]),
        n_trials=calls,
        show_progress_bar=sys.stderr.isatty(),
    )
    return int(allowed[study.best_params["place"]])
