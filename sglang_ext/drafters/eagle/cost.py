"""What a verify step costs an EAGLE drafter."""

from sglang_ext.drafters.counting import DecoderCost, row_flops, sizes
from sglang_ext.drafters.eagle.module import EagleDrafter
from sglang_ext.drafters.shared.features.cost import FeatureCost


def count(drafter: EagleDrafter, itemsize: int) -> FeatureCost:
    """Nothing is done to the target's states but in `fc`, which every row of every pass goes through."""
    body = drafter.config
    return FeatureCost(
        **sizes(drafter, itemsize),
        fuse_flops=0,
        layer=DecoderCost(
            flops_per_row=row_flops(drafter.fc, drafter.layers),
            flops_per_row_and_key=4 * body.num_attention_heads * body.head_dim,
        ),
    )
