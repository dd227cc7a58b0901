"""SlimSpec: a low-rank head over the full vocabulary, trained with the drafter.

logits = up (down hidden), down [r, H], up [V, r], no bias and nothing non-linear between. The full-rank head is gone
(this is no LoRA), nothing is truncated, so no token is out of reach. T = rows, H = hidden, V = vocabulary, r = rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from rayspec_kernels.common.best import Best
from rayspec_kernels.slim_head import slim_head
from sglang_ext.heads.base import Candidates, DraftHead, HeadCost, Shard, Share, dense_cost
from sglang_ext.heads.config import HeadConfig
from sglang_ext.settings import Count

MOMENT_FLOOR = 1e-4  # as a share of the mean of the diagonal
SHARE_FLOOR = 1e-2  # as a share of the mean share


@dataclass(frozen=True, kw_only=True, repr=False)
class SlimSpecConfig(HeadConfig):
    kind: ClassVar[str] = "slimspec"

    rank: Count

    @property
    def uses_states(self) -> bool:
        return True

    def check_sizes(self, hidden_size: int, vocab_size: int) -> None:
        super().check_sizes(hidden_size, vocab_size)
        limit = min(hidden_size, vocab_size)
        if self.rank > limit:
            raise ValueError(
                f"draft_head.rank must be in 1..{limit} (the smaller of hidden and vocabulary), got {self.rank}"
            )


class SlimSpecHead(DraftHead):
    projections = ("down", "up")
    Config = SlimSpecConfig
    config: SlimSpecConfig

    def __init__(self, config: SlimSpecConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.down = self.new_parameter(config.rank, hidden_size)
        self.up = self.new_parameter(vocab_size, config.rank)

    @classmethod
    def from_target(cls, config: SlimSpecConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        """The best approximation of its rank; `artifacts` as `low_rank` takes them."""
        head = cls.unloaded(config, target_head_VH)
        down_rH, up_Vr = low_rank(target_head_VH, config.rank, artifacts)
        head.down.data.copy_(down_rH)
        head.up.data.copy_(up_Vr)
        return head

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        return Candidates(self.project(self.project(hidden_TH, "down"), "up"), None)

    def fused(self, hidden_TH: Tensor, step: int, k: int, routed: Tensor | None) -> Best:
        return slim_head(hidden_TH, self.stored("down"), self.stored("up"), k)

    def shard(self, rank: int, ranks: int) -> Shard | None:
        """Rows of `up`; every rank projects down by itself."""
        if self.vocab_size // ranks < self.config.rank:
            return None
        share = Share(rank, ranks, (self.vocab_size,))
        return Shard(self.with_rows(self.config, share.own_sizes[0], share.rows, "up"), share, None)

    def as_matrix(self) -> tuple[Tensor, None]:
        """Up down, which is the size of a full head again."""
        return self.all_rows("up").float() @ self.all_rows("down").float(), None

    def cost(self, rows: int, step: int = 0, scored: float | None = None) -> HeadCost:
        down, up = dense_cost(rows, self.down), dense_cost(rows, self.up)
        return HeadCost(bytes=down.bytes + up.bytes, flops=down.flops + up.flops)


def low_rank(weight_VH: Tensor, rank: int, artifacts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Best rank-r approximation W ~ up down, down [r, H], up [V, r], float32, both of one size in each direction.

    Best in E[sum_v f_v ((W - up down) h)_v^2]: with `hidden_moment` E[h h^T] and `token_share` f among the artifacts
    over the states that the head meets, and its error counts most for the tokens that are asked for. Without them
    every direction and every token counts the same, which is the plain SVD.
    """
    V, H = weight_VH.shape
    weight_VH = weight_VH.float()
    # the floors: directions and tokens that were never met still count a little
    moment_HH = artifacts.get("hidden_moment", torch.eye(H)).double()
    values_H, vectors_HH = torch.linalg.eigh(moment_HH + MOMENT_FLOOR * moment_HH.diagonal().mean() * torch.eye(H))
    root_HH, inverse_HH = (vectors_HH * values_H**power @ vectors_HH.T for power in (0.5, -0.5))
    share_V = artifacts.get("token_share", torch.ones(V)).float()
    share_V = share_V + SHARE_FLOOR * share_V.mean()
    # the right singular vectors of sqrt(f) W root
    gram_HH = root_HH @ (weight_VH.T @ (share_V[:, None] * weight_VH)).double() @ root_HH
    directions_Hr = torch.linalg.eigh(gram_HH).eigenvectors.flip(1)[:, :rank]
    up_Vr, down_rH = weight_VH @ (root_HH @ directions_Hr).float(), (directions_Hr.T @ inverse_HH).float()
    balance_r = (down_rH.norm(dim=1) / up_Vr.norm(dim=0).clamp_min(torch.finfo(torch.float32).tiny)).sqrt()
    return down_rH / balance_r[:, None], up_Vr * balance_r
