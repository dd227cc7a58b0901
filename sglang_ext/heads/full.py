"""EAGLE-3's own head: one matrix over the whole target vocabulary (METHODS: EAGLE-3, Li et al. 2025, section 3).

T = rows, H = drafter hidden size, V = target vocabulary.
"""

from typing import Self

import torch
from torch import Tensor, nn

from sglang_ext.heads.base import DraftHead, HeadConfig, HeadCost, weight_bytes


class FullHead(DraftHead):
    """logits = weight @ hidden, weight [V, H]; the checkpoint's tensor is `lm_head.weight` as in stock EAGLE-3."""

    kind = "full"

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        # NaN until loaded or initialised: forgetting it is loud
        self.weight = nn.Parameter(torch.full((config.vocab_size, config.hidden_size), float("nan")))

    @classmethod
    def from_target(cls, config: HeadConfig, target_head_VH: Tensor) -> Self:
        head = cls(config)
        head.weight.data.copy_(target_head_VH)
        return head

    def logits(self, hidden_TH: Tensor, step: int = 0, token_embed_TH: Tensor | None = None) -> Tensor:
        return self.project(hidden_TH, "weight")

    def cost(self, rows: int) -> HeadCost:
        V, H, size = self.config.vocab_size, self.config.hidden_size, self.weight.element_size()
        return HeadCost(bytes=weight_bytes(self) + rows * (H + V) * size, flops=2 * rows * H * V)
