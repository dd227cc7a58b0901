"""What a verify step costs a drafter that drafts from one vector a request."""

from dataclasses import dataclass

import torch

from sglang_ext.drafters.counting import DecoderCost, StepShape, head_cost, sizes
from sglang_ext.drafters.shared.last_hidden.module import LastHiddenDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.trees import CandidateTree


@dataclass(frozen=True, kw_only=True)
class LastHiddenCost:
    """`context_layer`: of a row of the attention over the context, with what comes before it, where there is one.
    `begin_flops`: of a draft, before its first position.

    `position_flops`: of one row at each draft position, its head left out. `position_bytes`: the part of the body that
    no position before it reads. `reads_path`: whether every node with children is a row of its own; otherwise a
    position is one row. `tree`: None for a chain.
    """

    params: int
    body_bytes: int
    position_bytes: tuple[int, ...]
    context_layer: DecoderCost
    begin_flops: int
    position_flops: tuple[int, ...]
    head: DraftHead | PositionHeads
    reads_path: bool
    tree: CandidateTree | None

    def rows(self, shape: StepShape) -> list[int]:
        """Rows that the head is asked about at each draft position."""
        if self.tree is None or shape.topk == 1:
            return [1] * shape.draft_steps
        fitted = self.tree.fit(shape.draft_steps, shape.topk, shape.num_draft_tokens, torch.device("cpu"))
        return [n if self.reads_path else 1 for n in fitted.rows_by_level()]

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: a context layer sees every verified token, and one row is drafted from."""
        rows = self.rows(shape)
        states = sum(n * flops for n, flops in zip(rows, self.position_flops, strict=False))
        before = self.context_layer.flops(shape.verified, keys) + self.begin_flops
        return before + states + head_cost(self.head, rows, shape).flops

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Bytes read in one step: the body once, as far as positions are drafted; it has no embedding of its own."""
        body = self.body_bytes - sum(self.position_bytes[shape.draft_steps :])
        return body + head_cost(self.head, self.rows(shape), shape).bytes


NO_LAYER = DecoderCost(flops_per_row=0, flops_per_row_and_key=0)


def count(
    drafter: LastHiddenDrafter, itemsize: int, context_layer: DecoderCost = NO_LAYER, begin_flops: int = 0
) -> LastHiddenCost:
    positions = range(drafter.config.positions)
    read, position_bytes = set[int](), []
    for i in positions:
        own = {id(p): p.numel() for part in drafter.parts(i) for p in part.parameters() if id(p) not in read}
        position_bytes.append(itemsize * sum(own.values()))
        read |= own.keys()
    return LastHiddenCost(
        **sizes(drafter, itemsize),
        position_bytes=tuple(position_bytes),
        context_layer=context_layer,
        begin_flops=begin_flops,
        position_flops=tuple(drafter.state_flops(i) for i in positions),
        reads_path=drafter.reads_path,
        tree=drafter.draft_tree,
    )
