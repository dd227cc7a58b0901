"""What drafters share that draft from one vector a request. It is the target's last hidden state: Medusa, Hydra, and
BPD as their chain; or what attention of their own over the context has made of the target's features (`Context`).

B = sequences, T = rows, N = rows of several sequences, H = hidden size of the target, G = width of the features that
are read of it, d = tokens of a path.

h_t is the target's hidden state of token x_t, after its final norm: what its own LM head reads. By then the target has
already named x_{t+1}, the root of every draft. Draft position i (from 0) predicts x_{t+2+i}. Such a drafter has no
cache and no layer that SGLang would run, unless it is a `Context`, and all positions can be drafted from one h_t.
"""

from abc import ABC, abstractmethod
from itertools import repeat
from typing import ClassVar

import torch
from torch import Tensor, nn

from sglang_ext.drafters.base import Drafter, Question
from sglang_ext.drafters.layers import RMSNorm
from sglang_ext.drafters.shared.last_hidden.config import LastHiddenConfig


class LastHiddenDrafter(Drafter, ABC):
    """`lm_head` projects the state of a position to the vocabulary."""

    config: LastHiddenConfig
    reads_path: ClassVar[bool]  # whether a position's state depends on the tokens drafted before it

    @property
    def body_dtype(self) -> torch.dtype:
        """The head's may be another: training keeps frozen rows in the target's."""
        return next(p.dtype for name, p in self.named_parameters() if not name.startswith("lm_head."))

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

    def questions(self, draft_steps: int, topk: int, num_draft_tokens: int) -> list[Question]:
        """Of a chain the best token of one row; of a tree what each of its levels asks: of one row, or where a state
        depends on the path of each node with children."""
        if topk == 1:
            return [Question(1, 1)] * draft_steps
        assert self.draft_tree is not None, "none else drafts a tree"
        tree = self.draft_tree.fit(draft_steps, topk, num_draft_tokens, torch.device("cpu"))
        rows_by_level = tree.rows_by_level() if self.reads_path else repeat(1)
        return [Question(*asked) for asked in zip(rows_by_level, tree.candidates_by_level(), strict=False)]

    def state_flops(self, step: int) -> int:
        """FLOPs of the state of one row, two per multiplication and addition."""
        layers = [m for part in self.parts(step) for m in part.modules() if isinstance(m, nn.Linear)]
        return 2 * sum(layer.weight.numel() for layer in layers)

    @abstractmethod
    def parts(self, step: int) -> list[nn.Module]:
        """The modules that `state` of a draft position runs through."""


class Context:
    """Beside `LastHiddenDrafter`: what a request carries is I + MSA(norm(I)) of its last accepted token, attention over
    the context that is causal, rotary and has a cache of its own; I is made of the target's features.

    In decoding it runs over what the target has just verified. Whatever follows it is a matter of the one row that is
    carried, and belongs into `begin`.
    """

    context_norm: RMSNorm
    context_attn: nn.Module | None  # None where SGLang's own attention stands in

    def fuse(self, features_NG: Tensor) -> Tensor:
        """I [N, H]."""
        return features_NG

    def context(self, features_BTG: Tensor) -> Tensor:
        """What would be carried after each token of whole sequences [B, T, H], without a cache."""
        B, T, _ = features_BTG.shape
        I_BTH = self.fuse(features_BTG.flatten(0, 1)).unflatten(0, (B, T))
        positions_BT = torch.arange(T, device=features_BTG.device).expand(B, T)
        assert self.context_attn is not None, "SGLang serves it"
        return I_BTH + self.context_attn(self.context_norm(I_BTH), causal=True, positions_BT=positions_BT)
