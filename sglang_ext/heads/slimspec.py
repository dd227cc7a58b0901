"""SlimSpec: a low-rank head over the full vocabulary, trained with the drafter.

logits = up (down hidden), down [r, H], up [V, r], no bias and nothing non-linear between. The full-rank head is gone
(this is no LoRA), nothing is truncated, so no token is out of reach. T = rows, H = hidden, V = vocabulary, r = rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.slim_head import slim_head
from sglang_ext.heads.base import Candidates, DraftHead, HeadConfig, HeadCost, Shard, dense_cost, even_rows


@dataclass(frozen=True, kw_only=True)
class SlimSpecConfig(HeadConfig):
    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = min(self.hidden_size, self.vocab_size)
        if not 1 <= self.rank <= limit:
            raise ValueError(
                f"draft_head.rank must be in 1..{limit} (the smaller of hidden and vocabulary), got {self.rank}"
            )


class SlimSpecHead(DraftHead):
    kind = "slimspec"
    projections = ("down", "up")
    Config = SlimSpecConfig
    config: SlimSpecConfig

    def __init__(self, config: SlimSpecConfig) -> None:
        super().__init__(config)
        self.down = self.new_parameter(config.rank, config.hidden_size)
        self.up = self.new_parameter(config.vocab_size, config.rank)

    @classmethod
    def from_target(cls, config: SlimSpecConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """The best approximation of its rank."""
        head = cls(config)
        down_rH, up_Vr = low_rank(target_head_VH, config.rank)
        head.down.data.copy_(down_rH)
        head.up.data.copy_(up_Vr)
        return head

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        return Candidates(self.project(self.project(hidden_TH, "down"), "up"), None)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best:
        return slim_head(hidden_TH, self.stored("down"), self.stored("up"), k)

    def shard(self, rank: int, ranks: int) -> Shard | None:
        """Rows of `up`; every rank projects down by itself."""
        rows = even_rows(self.config.vocab_size, ranks)
        if self.config.weight_format is not None or min(rows) < self.config.rank:
            return None
        first, own = sum(rows[:rank]), rows[rank]
        part = self.with_rows(replace(self.config, vocab_size=own), up=self.up[first : first + own])
        return Shard(part, first, rows, own, None)

    def as_matrix(self) -> tuple[Tensor, None]:
        """Up down, which is the size of a full head again."""
        return self.all_rows("up").float() @ self.all_rows("down").float(), None

    def cost(self, rows: int) -> HeadCost:
        down, up = dense_cost(rows, self.down), dense_cost(rows, self.up)
        return HeadCost(bytes=down.bytes + up.bytes, flops=down.flops + up.flops)


def low_rank(weight_VH: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Best rank-r approximation W ~ up down: W = U S V^T, down = S_r^(1/2) V_r^T [r, H], up = U_r S_r^(1/2) [V, r]."""
    u_VK, s_K, vt_KH = torch.linalg.svd(weight_VH.float(), full_matrices=False)
    root_r = s_K[:rank].sqrt()
    return root_r[:, None] * vt_KH[:rank], u_VK[:, :rank] * root_r
