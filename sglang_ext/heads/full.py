"""EAGLE-3's own head: one matrix over the whole target vocabulary (Li et al. 2025, section 3).

T = rows, H = drafter hidden size, V = target vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.head_topk import head_topk
from sglang_ext.heads.base import Candidates, DraftHead, HeadCost, Shard, Share, dense_cost
from sglang_ext.heads.config import HeadConfig


@dataclass(frozen=True, kw_only=True, repr=False)
class FullConfig(HeadConfig):
    """`bias`: each token has a bias, which is added to its logit, as in published Hydra heads. It is added in torch,
    without a fused kernel, and no other head takes rows over from a head with a bias."""

    kind: ClassVar[str] = "full"
    added: ClassVar[frozenset[str]] = frozenset({"bias"})

    bias: bool = False

    @property
    def taken_over(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.bias else ("weight",)

    @property
    def gives_rows(self) -> bool:
        return self.weight_format is None and not self.bias


class FullHead(DraftHead):
    """logits = weight @ hidden (+ bias [V]), weight [V, H]; the checkpoint's tensor is `lm_head.weight` as in stock
    EAGLE-3."""

    projections = ("weight",)
    Config = FullConfig

    config: FullConfig

    def __init__(self, config: FullConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.weight = self.new_parameter(vocab_size, hidden_size)
        if config.bias:
            self.bias = self.new_parameter(vocab_size)

    @classmethod
    def from_target(cls, config: FullConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        head = cls.unloaded(config, target_head_VH)
        head.weight.data.copy_(target_head_VH)
        if config.bias:
            head.bias.data.zero_()
        return head

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        logits_TV = self.project(hidden_TH, "weight")
        return Candidates(logits_TV + self.bias if self.config.bias else logits_TV, None)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best | None:
        return None if self.config.bias else head_topk(hidden_TH, self.stored("weight"), k)

    def shard(self, rank: int, ranks: int) -> Shard:
        share = Share(rank, ranks, (self.vocab_size,))
        return Shard(self.with_rows(self.config, share.own_sizes[0], share.rows, "weight", "bias"), share, None)

    def as_matrix(self) -> tuple[Tensor, None] | None:
        return None if self.config.bias else (self.all_rows("weight"), None)

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        cost = dense_cost(rows, self.weight)
        if not self.config.bias:
            return cost
        return HeadCost(cost.bytes + self.bias.nbytes, cost.flops + rows * self.bias.numel())
