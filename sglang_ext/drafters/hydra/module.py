"""Hydra (Ankner et al. 2024): Medusa's heads, each of which also reads the tokens drafted before it.

Position i reads x = [h; E(y_0); ...; E(y_i)], y_0 the root and y_1.. the drafted path, (i + 2) H wide; its state is
R_i x + SiLU(A_i x + b_i). R_i starts as [1 0 ... 0], A_i and b_i as zero: untrained it proposes what Medusa does.
E is the target's embedding. Its rows are brought to unit size first: a trained target's are some hundred times smaller
than its hidden states; heads made by the authors' code (`as_published`) read them as they are, and their R_i has a
bias. T = rows, H = hidden size of the target, d = tokens of a path.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.hydra.config import HydraConfig
from sglang_ext.drafters.last_hidden.module import LastHiddenDrafter


class HydraDrafter(LastHiddenDrafter):
    """Drafted level by level, all nodes of a level at once."""

    config: HydraConfig
    reads_path = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        H, positions = self.config.hidden_size, self.config.positions
        biased = self.config.as_published
        self.residuals = nn.ModuleList(nn.Linear((i + 2) * H, H, bias=biased) for i in range(positions))
        self.blocks = nn.ModuleList(nn.Linear((i + 2) * H, H) for i in range(positions))
        for residual, block in zip(self.residuals, self.blocks, strict=True):
            nn.init.zeros_(residual.weight)
            residual.weight.data[:, :H].fill_diagonal_(1.0)
            if residual.bias is not None:
                nn.init.zeros_(residual.bias)
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def parts(self, step: int) -> list[nn.Module]:
        return [self.residuals[step], self.blocks[step]]

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        assert path_TdH is not None, "reads_path"
        assert path_TdH.shape[1] == step + 1, "the root and every token drafted before"
        read_TdH = path_TdH if self.config.as_published else F.rms_norm(path_TdH, path_TdH.shape[-1:])
        x_TK = torch.cat([hidden_TH, read_TdH.flatten(1)], dim=-1)
        return self.residuals[step](x_TK) + F.silu(self.blocks[step](x_TK))


Drafter = HydraDrafter
