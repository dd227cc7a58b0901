"""What every draft head is: the map from a drafter's hidden state to candidate tokens.

T = rows (tokens), H = drafter hidden size, V = target vocabulary, S = the head's support (S <= V), k = candidates.

A head is a plain torch module without any SGLang import: the trainer and the SGLang adapter run the same code.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rayspec_kernels.packed_linear.kernel import PackedLinear, can_pack


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Shapes that every head knows; they come from the drafter's config, not from `draft_head`."""

    hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def from_dict(cls, kind: str, options: Mapping[str, Any], *, hidden_size: int, vocab_size: int) -> Self:
        """Build from the `draft_head` entry of a checkpoint or a training config (without its `kind`).

        Raises ValueError for an option that this kind does not have or that it needs and was not given.
        """
        own = {f.name: f for f in fields(cls) if f.name not in ("hidden_size", "vocab_size")}
        unknown = sorted(set(options) - set(own))
        if unknown:
            known = ", ".join(own) or "none"
            raise ValueError(f"draft_head of kind '{kind}' has no option {unknown[0]!r}; its options: {known}")
        try:
            return cls(hidden_size=hidden_size, vocab_size=vocab_size, **options)
        except TypeError as error:
            raise ValueError(f"draft_head of kind '{kind}' needs the options {', '.join(own)}: {error}") from error

    def options(self) -> dict[str, Any]:
        """The entries that `draft_head` stores beside `kind`; inverse of `from_dict`."""
        return {k: v for k, v in asdict(self).items() if k not in ("hidden_size", "vocab_size")}


class Proposal(NamedTuple):
    """The k best candidates of each row: log q(token) = scores - log_norm."""

    scores_Tk: Tensor  # float32 logits, best first
    token_ids_Tk: Tensor  # int64 target-token ids
    log_norm_T: Tensor  # float32 log-sum-exp over the head's support


class HeadCost(NamedTuple):
    """Least work of one call: weights and activations that must move once, and multiply-adds counted as two."""

    bytes: int
    flops: int


class DraftHead(nn.Module):
    """Base of all heads. A kind implements `logits` and `from_target`, and overrides what its support changes.

    `step` is the position in the draft (0 = the token after the verified one); it is a Python int, so that a
    captured graph has it baked in. `token_embed_TH` is the embedding of each row's input token, for heads that
    route on it; the others ignore it.
    """

    kind: ClassVar[str]
    Config: ClassVar[type[HeadConfig]] = HeadConfig

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self._packed: dict[str, PackedLinear] = {}

    @classmethod
    @abstractmethod
    def from_target(cls, config: Any, target_head_VH: Tensor) -> Self:
        """A head initialised from the target's LM head [V, H] (any float dtype; computed in float32)."""

    def project(self, x_TK: Tensor, weight: str) -> Tensor:
        """x W^T with the parameter named `weight`, from its packed copy once `pack` has been called."""
        packed = self._packed.get(weight)
        return F.linear(x_TK, getattr(self, weight)) if packed is None else packed(x_TK)

    def pack(self) -> None:
        """Make packed copies of the projections for serving on a CPU; call it again after the weights changed."""
        self._packed = {name: PackedLinear(p) for name, p in self.named_parameters() if can_pack(p)}

    @abstractmethod
    def logits(self, hidden_TH: Tensor, step: int = 0, token_embed_TH: Tensor | None = None) -> Tensor:
        """Logits [T, S] over the support, in the dtype of `hidden_TH`."""

    def support_ids(self, step: int = 0) -> Tensor | None:
        """Target ids int64 [S] of the columns of `logits`, or None where column v is token v."""
        return None

    def propose(self, hidden_TH: Tensor, step: int, token_embed_TH: Tensor | None, k: int) -> Proposal:
        """The k best candidates of each row, normalised over the support. Equal logits: the lower id at k = 1."""
        logits_TS = self.logits(hidden_TH, step, token_embed_TH).float()
        if not 1 <= k <= logits_TS.shape[-1]:
            raise ValueError(f"k must be in 1..{logits_TS.shape[-1]} (the head's support), got {k}")
        if k == 1:  # argmax has a tie rule (first), topk has none
            columns_Tk = logits_TS.argmax(dim=-1, keepdim=True)
            scores_Tk = logits_TS.gather(-1, columns_Tk)
        else:
            scores_Tk, columns_Tk = logits_TS.topk(k, dim=-1)
        ids_S = self.support_ids(step)
        token_ids_Tk = columns_Tk if ids_S is None else ids_S[columns_Tk]
        return Proposal(scores_Tk, token_ids_Tk, logits_TS.logsumexp(dim=-1))

    def distribution(
        self, hidden_TH: Tensor, step: int = 0, token_embed_TH: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(q float32 [T, S], ids int64 [S] or None): the law that the drafter samples from, rows sum to 1."""
        return self.logits(hidden_TH, step, token_embed_TH).float().softmax(dim=-1), self.support_ids(step)

    def target_logits(self, hidden_TH: Tensor, step: int = 0, token_embed_TH: Tensor | None = None) -> Tensor:
        """Float32 logits [T, V] in target ids, the most negative finite value off the support."""
        logits_TS = self.logits(hidden_TH, step, token_embed_TH).float()
        ids_S = self.support_ids(step)
        if ids_S is None:
            return logits_TS
        out_TV = logits_TS.new_full((logits_TS.shape[0], self.config.vocab_size), torch.finfo(torch.float32).min)
        return out_TV.index_copy_(1, ids_S, logits_TS)

    def training_targets(self, p_TV: Tensor) -> tuple[Tensor, Tensor]:
        """What the head is trained towards: (P [T, S] rows summing to 1, mask bool [T] of rows that count).

        The full support has nothing to renormalise and keeps every row.
        """
        return p_TV, torch.ones(p_TV.shape[0], dtype=torch.bool, device=p_TV.device)

    @abstractmethod
    def cost(self, rows: int) -> HeadCost:
        """Least bytes moved (at the parameters' dtype) and FLOPs for `rows` rows."""


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
