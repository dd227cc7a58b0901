"""SpecFormer: every draft position from one pass over the target's features."""

from sglang_ext.drafters.specformer.config import SpecFormerConfig, specformer_taps
from sglang_ext.drafters.specformer.module import SpecFormerDrafter

__all__ = ["SpecFormerConfig", "SpecFormerDrafter", "specformer_taps"]
