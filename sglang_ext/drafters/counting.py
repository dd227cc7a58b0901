"""What a verify step costs a drafter, by count: the measures that every family's `cost.py` is written in.

FLOPs are those of matrix products and of attention, two per multiplication and addition; norms, activations and the
choice of tokens are left out. A head is asked for its own cost at every draft step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from sglang_ext.drafters.base import Drafter
from sglang_ext.heads import DraftHead, HeadCost
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.heads.quantized import QuantizedMatrix


@dataclass(frozen=True, kw_only=True)
class DecoderCost:
    """A stack of dense layers: what one row (token) costs, and one key that it attends to."""

    flops_per_row: int
    flops_per_row_and_key: int

    def flops(self, rows: float, keys: float) -> float:
        """FLOPs of `rows` rows that each attend to `keys` keys."""
        return rows * (self.flops_per_row + keys * self.flops_per_row_and_key)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Rows of a verify step of one request. `draft_steps` 0 is plain decoding. `num_draft_tokens` were asked for, with
    the root. Where an engine counted them: `counted` is what a step verified in the mean, `scored` the tokens that the
    head scored for a row at each draft position (None for one of which nothing was counted)."""

    draft_steps: int = 0
    topk: int = 1
    num_draft_tokens: int = 1
    counted: float | None = None
    scored: tuple[float | None, ...] = ()

    @property
    def rows(self) -> list[int]:
        """Rows that the head is asked about at each draft step of a drafter that goes step by step."""
        return [1] + [self.topk] * (self.draft_steps - 1)

    @property
    def verified(self) -> float:
        return self.num_draft_tokens if self.counted is None else self.counted

    def scored_at(self, position: int) -> float | None:
        return self.scored[position] if position < len(self.scored) else None


class DrafterCost(Protocol):
    """`params`: body and head, and a token embedding of its own. `body_bytes`: without the head. `head`: shapes."""

    @property
    def params(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def head(self) -> DraftHead | PositionHeads: ...

    def rows(self, shape: StepShape) -> list[int]:
        """Rows that the head is asked about at each draft position of a step of one request."""
        ...

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step of one request whose context is `keys` tokens long."""
        ...

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Bytes read in one step; `embedding_bytes` are the target's token embedding."""
        ...


CostOf = Callable[[Drafter, int], DrafterCost]  # takes a drafter on `meta` and the bytes that a parameter is served in


def sizes(drafter: Drafter, itemsize: int) -> dict[str, Any]:
    """`params`, `body_bytes` and `head` of a drafter whose parameters are served in `itemsize` bytes; matrices of the
    head that are stored in fewer bits count their own."""
    matrices = [m for m in drafter.modules() if isinstance(m, QuantizedMatrix)]
    head_params = {id(p) for p in drafter.lm_head.parameters()}
    return {
        "head": drafter.lm_head,
        "params": sum(p.numel() for p in drafter.parameters()) + sum(m.shape.numel() for m in matrices),
        "body_bytes": itemsize * sum(p.numel() for p in drafter.parameters() if id(p) not in head_params),
    }


def row_flops(*modules: nn.Module) -> int:
    """FLOPs of the linear layers, for one row."""
    return 2 * sum(m.weight.numel() for module in modules for m in module.modules() if isinstance(m, nn.Linear))


def head_cost(head: DraftHead | PositionHeads, rows: Sequence[int], shape: StepShape) -> HeadCost:
    """Cost of the head in a step that asks it about so many rows at each draft position."""
    parts = [head.at(i).cost(n, i, shape.scored_at(i)) for i, n in enumerate(rows)]
    return HeadCost(bytes=sum(part.bytes for part in parts), flops=sum(part.flops for part in parts))


def is_scoring_known(drafter: DrafterCost, shape: StepShape) -> bool:
    """Whether it is known how many tokens the head scores at each draft position: by its shape, or counted. Else its
    cost is an estimate."""
    positions = range(len(drafter.rows(shape)))
    return all(drafter.head.at(i).shortlist_size(i) is not None or shape.scored_at(i) is not None for i in positions)


def known_shortlist(drafter: DrafterCost, shape: StepShape) -> dict[str, float] | None:
    """The tokens that the head scores for a row, in the mean over the rows of a step and at most; None where a router
    decides it at some position."""
    rows = drafter.rows(shape)
    sizes = [size for i in range(len(rows)) if (size := drafter.head.at(i).shortlist_size(i)) is not None]
    if len(sizes) < len(rows):
        return None
    mean = sum(n * size for n, size in zip(rows, sizes, strict=True)) / sum(rows)
    return {"shortlist_mean": mean, "shortlist_max": float(max(sizes))}


def step_by_step_flops(shape: StepShape, keys: float, layers: DecoderCost, head: DraftHead | PositionHeads) -> float:
    """FLOPs of one step of a drafter that extends by every verified token, scores the last of them, and makes
    draft_steps - 1 further forwards of `topk` rows with their scores."""
    later = (shape.draft_steps - 1) * shape.topk
    return layers.flops(shape.verified + later, keys) + head_cost(head, shape.rows, shape).flops
