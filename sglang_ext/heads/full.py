"""EAGLE-3's own head: one matrix over the whole target vocabulary (Li et al. 2025, section 3).

T = rows, H = drafter hidden size, V = target vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.head_topk import head_topk
from sglang_ext.heads.base import Candidates, DraftHead, HeadConfig, HeadCost, Shard, dense_cost, even_rows


class FullHead(DraftHead):
    """logits = weight @ hidden, weight [V, H]; the checkpoint's tensor is `lm_head.weight` as in stock EAGLE-3."""

    kind = "full"
    projections = ("weight",)
    taken_over = ("weight",)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.weight = self.new_parameter(config.vocab_size, config.hidden_size)

    @classmethod
    def from_target(cls, config: HeadConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        head = cls(config)
        head.weight.data.copy_(target_head_VH)
        return head

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        return Candidates(self.project(hidden_TH, "weight"), None)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best:
        return head_topk(hidden_TH, self.stored("weight"), k)

    def shard(self, rank: int, ranks: int) -> Shard | None:
        if self.config.weight_format is not None:
            return None
        rows = even_rows(self.config.vocab_size, ranks)
        first, own = sum(rows[:rank]), rows[rank]
        part = self.with_rows(replace(self.config, vocab_size=own), weight=self.weight[first : first + own])
        return Shard(part, first, rows, own, None)

    def as_matrix(self) -> tuple[Tensor, None]:
        return self.all_rows("weight"), None

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        return dense_cost(rows, self.weight)
