"""What a verify step costs a Hydra drafter."""

from sglang_ext.drafters.counting import DecoderCost, row_flops
from sglang_ext.drafters.hydra.module import HydraDrafter
from sglang_ext.drafters.shared.last_hidden import cost as last_hidden
from sglang_ext.drafters.shared.last_hidden.cost import LastHiddenCost


def count(drafter: HydraDrafter, itemsize: int) -> LastHiddenCost:
    """The SwiGLU of a prefix layer is computed of the one row that is drafted from."""
    layer = drafter.config.layer
    if layer is None:
        return last_hidden.count(drafter, itemsize)
    assert drafter.context_attn is not None, "read from a folder"
    attention = DecoderCost(
        flops_per_row=row_flops(drafter.context_attn),
        flops_per_row_and_key=4 * layer.num_attention_heads * layer.head_dim,
    )
    return last_hidden.count(drafter, itemsize, attention, begin_flops=row_flops(drafter.mlp))
