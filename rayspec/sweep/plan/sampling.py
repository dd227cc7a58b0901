"""Whether a sweep says how its drafts are proposed where answers are drawn."""

from collections.abc import Iterable

from rayspec.sweep.candidate import Candidate
from rayspec.sweep.config import SweepConfig
from sglang_ext.trees import CandidateTree

DRAWS = "speculative_use_rejection_sampling"


def draws_drafts(config: SweepConfig, temperature: float) -> bool:
    """Whether drafts of a trial at this temperature are drawn, for which a head is asked for its distribution."""
    return temperature > 0 and bool(config.engine.extra.get(DRAWS))


def check_drafts_are_said(config: SweepConfig, candidates: Iterable[Candidate]) -> None:
    """Raise ValueError where chains are to be measured above temperature 0 without a word on whether their drafts are
    drawn: both ways are exact, but accept so differently that no comparison may mix them."""
    hot = [t for t in config.temperatures() if t > 0]
    if hot and DRAWS not in config.engine.extra and any(c.shape.topk == 1 for c in candidates):
        raise ValueError(
            f"temperature {', '.join(f'{t:g}' for t in hot)} draws answers, but engine.extra.{DRAWS} is not set; true "
            "has chains draw their drafts and accept min(1, p / q), false has them draft the likeliest token, which is "
            "as exact and accepted less often (docs/sampling.md)"
        )


def check_can_be_drawn(config: SweepConfig, topk: int, tree: CandidateTree | None) -> None:
    """Raise ValueError where drafts of a tree would be drawn whose nodes depend on them; `tree` is None where the
    drafter expands EAGLE-2's."""
    if not config.engine.extra.get(DRAWS):
        return
    if tree is not None:
        tree.check_can_be_drawn()
    else:
        raise ValueError(
            f"EAGLE-2's tree (topk {topk}) verifies the likeliest of the drafted tokens, but engine.extra.{DRAWS}=true "
            "draws drafts, and whether a draw is verified must not depend on what was drawn (docs/sampling.md); give "
            "such trees a sweep of their own without it"
        )
