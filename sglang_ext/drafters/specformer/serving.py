"""The algorithm that serves SpecFormer."""

from sglang_ext.drafters.serving import Serving

SERVING = Serving(
    chain="SPECFORMER",
    trees={},
    algorithm="sglang_ext.adapter.spec_algorithm:SpecFormerAlgorithm",
    drafts_in_turn=False,  # its slots see each other
)
