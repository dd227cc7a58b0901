"""RDK: gives mass back to the tokens that a reduced head cannot propose, along a fixed affinity between tokens.

q'' = q M with q the base head's law at the request's temperature and M [V, V] row-stochastic: a token keeps
`self_weight` and hands the rest to its nearest neighbours (cosine of output-embedding rows, softmax weights); the exact
affinity was not published.
T = rows, V = vocabulary, H = hidden, J = neighbours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ext.heads import build_head, head_config, head_from_target
from sglang_ext.heads.base import NO_TOKEN, Candidates, DraftHead, HeadConfig, HeadCost

AFFINITY_TEMPERATURE = 0.1
_CHUNK = 1024
_ONE = 2.0**60  # of fixed-point numbers: a row's sum is at most 1, and 64 bits hold 8


@dataclass(frozen=True, kw_only=True)
class RdkConfig(HeadConfig):
    """`base`: the `draft_head` entry of the head whose law is redistributed."""

    base: dict[str, Any]
    neighbours: int = 8
    self_weight: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_format is not None:
            raise ValueError(
                "draft_head.weight_format of an rdk head belongs into draft_head.base, whose weights it is"
            )
        if self.base.get("kind") == "rdk":
            raise ValueError("draft_head.base cannot be another rdk head")
        try:
            cls, config = head_config(self.base, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        except ValueError as error:
            raise ValueError(f"draft_head.base: {error}") from error
        object.__setattr__(self, "base", {"kind": cls.kind, **config.options()})
        if not 1 <= self.neighbours < self.vocab_size:
            raise ValueError(f"draft_head.neighbours must be in 1..{self.vocab_size - 1}, got {self.neighbours}")
        if not 0.0 < self.self_weight <= 1.0:
            raise ValueError(f"draft_head.self_weight must be in (0, 1], got {self.self_weight}")


class RdkHead(DraftHead):
    """`neighbour_ids` [V, J] and `neighbour_weights` [V, J], whose rows sum to 1."""

    kind = "rdk"
    Config = RdkConfig
    config: RdkConfig
    neighbour_ids: Tensor
    neighbour_weights: Tensor

    def __init__(self, config: RdkConfig) -> None:
        super().__init__(config)
        self.base = build_head(config.base, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        self.taken_over = tuple(f"base.{name}" for name in self.base.taken_over)  # type: ignore[misc]
        self.routes = self.base.routes  # type: ignore[misc]  # of this instance: it depends on the base
        self.register_buffer("neighbour_ids", torch.full((config.vocab_size, config.neighbours), -1))
        self.register_buffer("neighbour_weights", torch.full((config.vocab_size, config.neighbours), float("nan")))

    @classmethod
    def from_target(cls, config: RdkConfig, target_head_VH: Tensor, artifacts: Mapping[str, Tensor]) -> Self:
        head = cls(config)
        head.base = head_from_target(config.base, target_head_VH, artifacts)
        ids_VJ, weights_VJ = nearest_tokens(target_head_VH, config.neighbours)
        head.neighbour_ids.copy_(ids_VJ)
        head.neighbour_weights.copy_(weights_VJ)
        return head

    def pack(self) -> None:
        self.base.pack()

    def quantize(self, is_loaded: bool = True) -> None:
        self.base.quantize(is_loaded)

    def check(self, stop_ids: Iterable[int] = ()) -> None:
        V = self.config.vocab_size
        wrong = self.neighbour_ids[(self.neighbour_ids < 0) | (self.neighbour_ids >= V)]
        if len(wrong):
            raise ValueError(
                f"neighbour_ids must be in 0..{V - 1}, got {int(wrong[0])}; make the head again with "
                "python jobs/train.py"
            )
        sums_V = self.neighbour_weights.float().sum(dim=1)
        # the weights are stored in bfloat16, whose rounding `candidates` undoes
        if bool((self.neighbour_weights < 0).any()) or not torch.allclose(sums_V, torch.ones_like(sums_V), atol=0.02):
            raise ValueError(
                "neighbour_weights must be non-negative rows that sum to 1, got sums of "
                f"{float(sums_V.min()):.3g} to {float(sums_V.max()):.3g}; make the head again with python jobs/train.py"
            )
        self.base.check(stop_ids)

    def fewest_candidates(self, draft_steps: int) -> int:
        return self.base.fewest_candidates(draft_steps)

    def route(self, token_embed_TH: Tensor, feature_TH: Tensor, step: int) -> Tensor | None:
        return self.base.route(token_embed_TH, feature_TH, step)

    def distribution(
        self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None, temperature_T1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The base's law at the temperature, redistributed: q'' at a temperature is not a tempered q''."""
        c = self.config
        q_TS, ids = self.base.distribution(hidden_TH, step, routed, temperature_T1)
        if ids is None:
            ids = torch.arange(c.vocab_size, device=q_TS.device)
        # rows of the candidates alone: [S, J], or [T, S, J] where each row has its own
        weights_SJ = self.neighbour_weights[ids].float()
        weights_SJ = weights_SJ / weights_SJ.sum(dim=-1, keepdim=True)
        given_TSJ = (1 - c.self_weight) * q_TS[:, :, None] * weights_SJ
        given_TV = sums_of(given_TSJ.flatten(1), self.neighbour_ids[ids].expand_as(given_TSJ).flatten(1), c.vocab_size)
        # no token comes twice but with a probability of 0, so that these are no sums
        kept_TV = torch.zeros_like(given_TV).scatter_add_(1, ids.expand_as(q_TS), c.self_weight * q_TS)
        return kept_TV + given_TV, None

    def candidates(self, hidden_TH: Tensor, step: int = 0, routed: Tensor | None = None) -> Candidates:
        q_TV, _ = self.distribution(hidden_TH, step, routed)
        # a NaN (a base that was not loaded) stays one
        return Candidates(torch.where(q_TV == 0, NO_TOKEN, q_TV.log()).to(hidden_TH.dtype), None)

    def loss(self, hidden_TH: Tensor, step: int, routed: Tensor | None, p_TV: Tensor) -> Tensor:
        return self.base.loss(hidden_TH, step, routed, p_TV)

    def cost(self, rows: int) -> HeadCost:
        """The base's, and writing each row's law; how much is redistributed depends on the base's candidates."""
        base = self.base.cost(rows)
        return HeadCost(bytes=base.bytes + rows * self.config.vocab_size * 4, flops=base.flops)


def sums_of(values_Tn: Tensor, columns_Tn: Tensor, num_columns: int) -> Tensor:
    """float32 [T, columns]: the values in [0, 1] of each column added up, to the same bits in any order.

    CUDA adds where it happens to be, and floating-point sums depend on it: tensor-parallel ranks would draft different
    tokens. Integers do not; a float32 of 2^-36 or more is one of these exactly.
    """
    fixed_Tn = (values_Tn * _ONE).long()  # a fault, which is no number, stays visible in what tokens keep
    sums_TV = fixed_Tn.new_zeros(len(values_Tn), num_columns).scatter_add_(1, columns_Tn, fixed_Tn)
    return sums_TV.float() / _ONE


def nearest_tokens(weight_VH: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(ids [V, J], weights [V, J]) of each token's nearest other tokens by the cosine of their rows."""
    unit_VH = F.normalize(weight_VH.float(), dim=1)
    ids, weights = [], []
    for start in range(0, len(unit_VH), _CHUNK):
        cosine_nV = unit_VH[start : start + _CHUNK] @ unit_VH.T
        rows_n = torch.arange(len(cosine_nV))
        cosine_nV[rows_n, rows_n + start] = -2.0  # itself
        best = cosine_nV.topk(count, dim=1)
        ids.append(best.indices)
        weights.append((best.values / AFFINITY_TEMPERATURE).softmax(dim=1))
    return torch.cat(ids), torch.cat(weights)
