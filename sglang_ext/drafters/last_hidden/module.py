"""What drafters share that draft from one vector a request. It is the target's last hidden state: Medusa, Hydra, and
BPD as their chain; or (SpecFormer) what a layer of their own has made of several.

T = rows, H = hidden size of the target, d = tokens of a path.

h_t is the target's hidden state of token x_t, after its final norm: what its own LM head reads. By then the target has
already named x_{t+1}, the root of every draft. Draft position i (from 0) predicts x_{t+2+i}. Such a drafter has no
cache and no layer that SGLang would run, and all positions can be drafted from one h_t.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.last_hidden.config import LastHiddenConfig


class LastHiddenDrafter(Drafter, ABC):
    """`lm_head` projects the state of a position to the vocabulary."""

    config: LastHiddenConfig
    reads_path: ClassVar[bool]  # whether a position's state depends on the tokens drafted before it

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor:
        """What each position of a draft reads of the one vector of each row, [T, num_steps, H]; made once a draft."""
        return hidden_TH[:, None].expand(-1, num_steps, -1)

    @abstractmethod
    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        """What the head of a draft position reads, [T, H].

        Args:
            hidden_TH: what `begin` gives this position: for most the target's last hidden state itself.
            path_TdH: embeddings of the d = step + 1 tokens from the root on that are drafted before this position;
                None where `reads_path` is false.
        """

    def state_flops(self, step: int) -> int:
        """FLOPs of the state of one row, two per multiplication and addition."""
        layers = [m for part in self.parts(step) for m in part.modules() if isinstance(m, nn.Linear)]
        return 2 * sum(layer.weight.numel() for layer in layers)

    @abstractmethod
    def parts(self, step: int) -> list[nn.Module]:
        """The modules that `state` of a draft position runs through."""
