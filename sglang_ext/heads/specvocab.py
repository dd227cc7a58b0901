"""SpecVocab: a low-rank router shortlists n tokens per row, whose rows of the full head are scored exactly.

s = up (down h), I = the n best of s, logits = weight[I] h. SlimSpec of the same rank is this router used as the head.
T = rows, H = hidden, V = vocabulary, r = rank of the router, n = size of the shortlist.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.head_topk import head_topk
from sglang_ext.heads.base import Candidates, DraftHead, HeadCost, dense_cost, gather_cost
from sglang_ext.heads.config import HeadConfig
from sglang_ext.heads.losses import KL, Objective, soft_cross_entropy
from sglang_ext.heads.slimspec import low_rank
from sglang_ext.settings import Count

ROUTER_LOSS_WEIGHT = 0.1  # of the auxiliary loss on the router


@dataclass(frozen=True, kw_only=True, repr=False)
class SpecVocabConfig(HeadConfig):
    kind: ClassVar[str] = "specvocab"
    inference_options = HeadConfig.inference_options | {"size"}

    rank: Count
    size: Count

    @property
    def taken_over(self) -> tuple[str, ...]:
        return ("weight",)

    @property
    def uses_states(self) -> bool:
        return True

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        for name, limit, meaning in (
            ("rank", min(hidden_size, vocab_size), "the smaller of hidden and vocabulary"),
            ("size", vocab_size, "the vocabulary"),
        ):
            if getattr(self, name) > limit:
                raise ValueError(f"draft_head.{name} must be in 1..{limit} ({meaning}), got {getattr(self, name)}")


class SpecVocabHead(DraftHead):
    """`down` [r, H] and `up` [V, r] are the router, `weight` [V, H] the full head that rescores."""

    projections = ("down", "up")
    gathered = ("weight",)
    Config = SpecVocabConfig
    config: SpecVocabConfig

    def __init__(self, config: SpecVocabConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.down = self.new_parameter(config.rank, hidden_size)
        self.up = self.new_parameter(vocab_size, config.rank)
        self.weight = self.new_parameter(vocab_size, hidden_size)

    @classmethod
    def from_target(cls, config: SpecVocabConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """The router starts as the best approximation of its rank; `artifacts` as `low_rank` takes them."""
        head = cls.unloaded(config, target_head_VH)
        down_rH, up_Vr = low_rank(target_head_VH, config.rank, artifacts)
        head.down.data.copy_(down_rH)
        head.up.data.copy_(up_Vr)
        head.weight.data.copy_(target_head_VH)
        return head

    def router_logits(self, hidden_TH: Tensor) -> Tensor:
        return self.project(self.project(hidden_TH, "down"), "up")

    def fewest_candidates(self, draft_steps: int) -> int:
        return self.config.size

    def shortlist_size(self, step: int) -> int:
        """What is rescored; the router's look at the whole vocabulary is no score of the distribution."""
        return self.config.size

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        if self.config.size == self.vocab_size:
            return Candidates(self.project(hidden_TH, "weight"), None)
        scores_TV = self.router_logits(hidden_TH)
        with self.choosing():
            ids_Tn = scores_TV.topk(self.config.size, dim=-1, sorted=False).indices
            # ascending ids: equal logits resolve to the lower id as in the full head, and rows are read in order
            ids_Tn = ids_Tn.sort(dim=-1).values
        return Candidates(self.gather_dot(hidden_TH, "weight", ids_Tn), ids_Tn)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best | None:
        """For the whole vocabulary alone: kernels keep less than a shortlist; its rescoring is a kernel already."""
        return head_topk(hidden_TH, self.stored("weight"), k) if self.config.size == self.vocab_size else None

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        """The full head's (the shortlist is not trained through) plus a share of the router's own."""
        router_T = soft_cross_entropy(self.router_logits(hidden_TH), p_TV)
        if not (hidden_TH.requires_grad or self.weight.requires_grad):  # the router alone is trained
            return router_T
        return objective.of(self.project(hidden_TH, "weight"), p_TV) + ROUTER_LOSS_WEIGHT * router_T

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        if self.config.size == self.vocab_size:
            return dense_cost(rows, self.weight)
        down, up = dense_cost(rows, self.down), dense_cost(rows, self.up)
        read = gather_cost(rows, self.weight, self.config.size)
        return HeadCost(bytes=down.bytes + up.bytes + read.bytes, flops=down.flops + up.flops + read.flops)
