"""Medusa (Cai et al. 2024): one residual block and one vocabulary projection a draft position.

z_i = W_i (h + SiLU(A_i h + b_i)), A_i [H, H] and b_i start as zero, W_i as the target's LM head, so that an untrained
position proposes what the target would say next. W_i is any draft head. BPD (Stern et al. 2018) is the same with one
candidate a position, in a chain. T = rows, H = hidden size of the target.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.medusa.config import MedusaConfig
from sglang_ext.drafters.shared.last_hidden.module import LastHiddenDrafter


class MedusaDrafter(LastHiddenDrafter):
    """Every position sees h alone, so that all of them are drafted at once."""

    config: MedusaConfig
    reads_path = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        H = self.config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(H, H) for _ in range(self.config.positions))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def parts(self, step: int) -> list[nn.Module]:
        return [self.blocks[step]]

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        return hidden_TH + F.silu(self.blocks[step](hidden_TH))


Drafter = MedusaDrafter
