"""What a verify step costs a SpecFormer drafter."""

from dataclasses import dataclass

from sglang_ext.drafters.counting import DecoderCost, StepShape, head_cost, row_flops, sizes
from sglang_ext.drafters.specformer.module import SpecFormerDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads


@dataclass(frozen=True, kw_only=True)
class SpecFormerCost:
    """`layer`: of a row of the context layer, with what comes before it. `slots_flops`: of one draft up to its SwiGLU,
    for all slots that it was made for. `swiglu_flops`: of one draft position."""

    params: int
    body_bytes: int
    layer: DecoderCost
    slots_flops: int
    swiglu_flops: int
    head: DraftHead | PositionHeads

    def drafting(self, shape: StepShape, keys: float) -> float:
        """FLOPs of one step: the context layer sees every verified token, and one row is drafted from."""
        head = head_cost(self.head, [1] * shape.draft_steps, shape).flops
        return self.layer.flops(shape.verified, keys) + self.slots_flops + shape.draft_steps * self.swiglu_flops + head

    def read_bytes(self, shape: StepShape, embedding_bytes: int) -> float:
        """Of one step; without an embedding of its own, and the body is read once."""
        return self.body_bytes + head_cost(self.head, [1] * shape.draft_steps, shape).bytes


def count(drafter: SpecFormerDrafter, itemsize: int) -> SpecFormerCost:
    c = drafter.config
    assert drafter.context_attn is not None, "read from a folder"
    per_key = 4 * c.num_attention_heads * c.head_dim
    projection = row_flops(drafter.position_proj) if c.position_projection else 0
    return SpecFormerCost(
        **sizes(drafter, itemsize),
        layer=DecoderCost(flops_per_row=row_flops(drafter.fc, drafter.context_attn), flops_per_row_and_key=per_key),
        slots_flops=projection + c.positions * (row_flops(drafter.slot_attn) + c.positions * per_key),
        swiglu_flops=row_flops(drafter.mlp),
    )
