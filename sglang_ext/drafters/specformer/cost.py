"""What a verify step costs a SpecFormer drafter."""

from sglang_ext.drafters.counting import DecoderCost, row_flops
from sglang_ext.drafters.shared.last_hidden import cost as last_hidden
from sglang_ext.drafters.shared.last_hidden.cost import LastHiddenCost
from sglang_ext.drafters.specformer.module import SpecFormerDrafter


def count(drafter: SpecFormerDrafter, itemsize: int) -> LastHiddenCost:
    """The drafter's cost: before its first position it makes a draft up to its SwiGLU, for all slots that it has."""
    c = drafter.config
    assert drafter.context_attn is not None, "read from a folder"
    per_key = 4 * c.num_attention_heads * c.head_dim
    projection = row_flops(drafter.position_proj) if c.position_projection else 0
    return last_hidden.count(
        drafter,
        itemsize,
        DecoderCost(flops_per_row=row_flops(drafter.fc, drafter.context_attn), flops_per_row_and_key=per_key),
        begin_flops=projection + c.positions * (row_flops(drafter.slot_attn) + c.positions * per_key),
    )
