"""What a verify step costs an independent drafter."""

from dataclasses import dataclass

from sglang_ext.drafters.counting import DecoderCost, StepShape, head_cost, row_flops, sizes, step_by_step_flops
from sglang_ext.drafters.independent.module import IndependentDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads


@dataclass(frozen=True, kw_only=True)
class IndependentCost:
    """`params`: body, head and the token embedding, which is the drafter's own. `body_bytes`: without the head."""

    params: int
    body_bytes: int
    layers: DecoderCost
    head: DraftHead | PositionHeads

    def rows(self, shape: StepShape) -> list[int]:
        """Rows that the head is asked about at each draft position."""
        return shape.rows

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the passes of an EAGLE-3 drafter, with nothing to fuse."""
        return step_by_step_flops(shape, keys, self.layers, self.head)

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Bytes read in one step. `embedding_bytes` are the target's; the drafter's own are in its body."""
        return shape.draft_steps * self.body_bytes + head_cost(self.head, shape.rows, shape).bytes


def count(drafter: IndependentDrafter, itemsize: int) -> IndependentCost:
    own = drafter.config
    return IndependentCost(
        **sizes(drafter, itemsize),
        layers=DecoderCost(
            flops_per_row=row_flops(drafter.model),
            flops_per_row_and_key=4 * own.num_layers * own.num_attention_heads * own.head_dim,
        ),
    )
