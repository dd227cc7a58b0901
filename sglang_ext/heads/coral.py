"""CORAL: the vocabulary in a few large groups, and a linear router on the drafter's hidden state that picks some.

T = rows, H = hidden, M = groups, V = vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sglang_ext.heads.clustered import ClusteredConfig, ClusteredHead
from sglang_ext.heads.losses import KL, Objective, soft_cross_entropy
from sglang_ext.settings import Count


@dataclass(frozen=True, kw_only=True, repr=False)
class CoralConfig(ClusteredConfig):
    """`top` of the `clusters` groups are scored at every step."""

    kind: ClassVar[str] = "coral"
    inference_options = ClusteredConfig.inference_options | {"top"}

    top: Count

    def __post_init__(self) -> None:
        if self.top > self.clusters:
            raise ValueError(f"draft_head.top must be in 1..{self.clusters} (clusters), got {self.top}")

    def budget(self, step: int) -> int:
        return self.top


class CoralHead(ClusteredHead):
    projections = ("router",)
    Config = CoralConfig

    def __init__(self, config: CoralConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.router = self.new_parameter(config.clusters, hidden_size)

    def init_router(self) -> None:
        """A group's first router row is the mean of its tokens' rows."""
        sums_GH = torch.zeros(self.config.clusters + 1, self.hidden_size, dtype=torch.float32)
        sums_GH.index_add_(0, self.cluster_of, self.weight.data.float())
        counts = torch.bincount(self.cluster_of, minlength=self.config.clusters + 1)
        self.router.data.copy_(sums_GH[1:] / counts[1:, None])

    def cluster_scores(self, hidden_TH: Tensor, routed: Tensor | None) -> Tensor:
        return self.project(hidden_TH, "router")

    def loss(
        self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor, objective: Objective = KL
    ) -> Tensor:
        """Cross-entropy of the router against the target's mass on each group, plus the full head's own where it or
        the drafter is trained. Rows whose mass lies on pinned tokens teach the router nothing."""
        mass_TG = p_TV.new_zeros(len(p_TV), self.config.clusters + 1).index_add_(1, self.cluster_of, p_TV)[:, 1:]
        share_T = mass_TG.sum(dim=-1)
        targets_TG = mass_TG / share_T.clamp(min=1e-6)[:, None]
        loss_T = soft_cross_entropy(self.cluster_scores(hidden_TH, routed), targets_TG) * share_T
        if hidden_TH.requires_grad or self.weight.requires_grad:
            loss_T = loss_T + objective.of(self.project(hidden_TH, "weight"), p_TV)
        return loss_T
