"""Hydra (Ankner et al. 2024, arXiv 2402.05109): Medusa's heads, each of which also reads the tokens drafted before it.

Position i reads x = [h; E(y_0); ...; E(y_i)], y_0 the root and y_1.. the drafted path, (i + 2) H wide; its state is
R_i x + SiLU(A_i x + b_i). R_i starts as [1 0 ... 0], A_i and b_i as zero: untrained it proposes what Medusa does.
E is the target's embedding. Its rows are brought to unit size first: a trained target's are some hundred times smaller
than its hidden states; heads made by the authors' code (`as_published`) read them as they are, and their R_i has a
bias. T = rows, H = hidden size of the target, d = tokens of a path.

Hydra++ (the same paper): h is no more the target's last hidden state of one token, but what a decoder layer
makes of those of all tokens up to it, the prefix (h' = h + MSA(norm(h)); h'' = h' + SwiGLU(norm(h')); norm(h'')); and a
head's MLP goes on by layers s + SiLU(A s + b). What the layer adds and these A and b start as zero, so that such a
drafter, too, proposes at first what Medusa does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.hydra.config import HydraConfig
from sglang_ext.drafters.layers import Attention, RMSNorm, SwiGLU
from sglang_ext.drafters.shared.last_hidden.config import LayerShape
from sglang_ext.drafters.shared.last_hidden.module import Context, LastHiddenDrafter


class HydraDrafter(Context, LastHiddenDrafter):
    """Drafted level by level, all nodes of a level at once. With a prefix layer a request carries h', and what follows
    is made of that one row."""

    config: HydraConfig
    reads_path = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        H, positions, further = self.config.hidden_size, self.config.positions, self.config.mlp_layers - 1
        biased = self.config.as_published
        self.residuals = nn.ModuleList(nn.Linear((i + 2) * H, H, bias=biased) for i in range(positions))
        self.blocks = nn.ModuleList(nn.Linear((i + 2) * H, H) for i in range(positions))
        self.further = nn.ModuleList(nn.ModuleList(nn.Linear(H, H) for _ in range(further)) for _ in range(positions))
        for residual in self.residuals:
            nn.init.zeros_(residual.weight)
            residual.weight.data[:, :H].fill_diagonal_(1.0)
            if residual.bias is not None:
                nn.init.zeros_(residual.bias)
        for block in (*self.blocks, *(layer for layers in self.further for layer in layers)):
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        if self.config.prefix_layer:
            assert self.config.layer is not None, "made for a target, or read from a config.json"
            self._add_prefix_layer(self.config.layer)

    def _add_prefix_layer(self, shape: LayerShape) -> None:
        H, eps = shape.hidden_size, shape.rms_norm_eps
        self.context_norm, self.context_attn = RMSNorm(H, eps), Attention(shape)
        self.mlp_norm, self.mlp, self.norm = RMSNorm(H, eps), SwiGLU(H, shape.intermediate_size), RMSNorm(H, eps)
        nn.init.zeros_(self.context_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor:
        if self.config.prefix_layer:
            hidden_TH = self.norm(hidden_TH + self.mlp(self.mlp_norm(hidden_TH)))
        return super().begin(hidden_TH, num_steps)

    def parts(self, step: int) -> list[nn.Module]:
        return [self.residuals[step], self.blocks[step], self.further[step]]

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        assert path_TdH is not None, "reads_path"
        assert path_TdH.shape[1] == step + 1, "the root and every token drafted before"
        read_TdH = path_TdH if self.config.as_published else F.rms_norm(path_TdH, path_TdH.shape[-1:])
        x_TK = torch.cat([hidden_TH, read_TdH.flatten(1)], dim=-1)
        state_TH = self.residuals[step](x_TK) + F.silu(self.blocks[step](x_TK))
        for layer in self.further[step]:
            state_TH = state_TH + F.silu(layer(state_TH))
        return state_TH


Drafter = HydraDrafter
