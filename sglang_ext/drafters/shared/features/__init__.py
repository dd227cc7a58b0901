"""What drafters share that go step by step with one decoder layer over features; no family by itself."""

from sglang_ext.drafters.shared.features.config import FeatureConfig
from sglang_ext.drafters.shared.features.module import FeatureAttention, FeatureDrafter

__all__ = ["FeatureAttention", "FeatureConfig", "FeatureDrafter"]
