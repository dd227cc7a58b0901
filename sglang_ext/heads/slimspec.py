"""SlimSpec: a low-rank head over the full vocabulary, trained with the drafter.

logits = up (down hidden), down [r, H], up [V, r], no bias and nothing non-linear between. The full-rank head is gone
(this is no LoRA), nothing is truncated, so no token is out of reach. T = rows, H = hidden, V = vocabulary, r = rank.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from sglang_ext.heads.base import DraftHead, HeadConfig, HeadCost, weight_bytes


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
    Config = SlimSpecConfig
    config: SlimSpecConfig

    def __init__(self, config: SlimSpecConfig) -> None:
        super().__init__(config)
        # NaN until loaded or initialised: forgetting it is loud
        self.down = nn.Parameter(torch.full((config.rank, config.hidden_size), float("nan")))
        self.up = nn.Parameter(torch.full((config.vocab_size, config.rank), float("nan")))

    @classmethod
    def from_target(cls, config: SlimSpecConfig, target_head_VH: Tensor) -> Self:
        """Best rank-r approximation of the target head: W = U S V^T, up = U_r S_r^(1/2), down = S_r^(1/2) V_r^T."""
        head = cls(config)
        u_VK, s_K, vt_KH = torch.linalg.svd(target_head_VH.float(), full_matrices=False)
        root_r = s_K[: config.rank].sqrt()
        head.up.data.copy_(u_VK[:, : config.rank] * root_r)
        head.down.data.copy_(root_r[:, None] * vt_KH[: config.rank])
        return head

    def logits(self, hidden_TH: Tensor, step: int = 0, token_embed_TH: Tensor | None = None) -> Tensor:
        return self.project(self.project(hidden_TH, "down"), "up")

    def cost(self, rows: int) -> HeadCost:
        c, size = self.config, self.up.element_size()
        return HeadCost(
            bytes=weight_bytes(self) + rows * (c.hidden_size + 2 * c.rank + c.vocab_size) * size,
            flops=2 * rows * c.rank * (c.hidden_size + c.vocab_size),
        )
