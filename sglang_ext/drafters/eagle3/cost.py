"""What a verify step costs an EAGLE-3 drafter."""

from sglang_ext.drafters.counting import DecoderCost, row_flops, sizes
from sglang_ext.drafters.eagle3.module import Eagle3Drafter
from sglang_ext.drafters.shared.features.cost import FeatureCost


def count(drafter: Eagle3Drafter, itemsize: int) -> FeatureCost:
    body = drafter.config
    return FeatureCost(
        **sizes(drafter, itemsize),
        fuse_flops=2 * drafter.fc.weight.numel(),
        layer=DecoderCost(
            flops_per_row=row_flops(drafter.midlayer),
            flops_per_row_and_key=4 * body.num_attention_heads * body.head_dim,
        ),
    )
