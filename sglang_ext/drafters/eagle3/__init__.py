"""EAGLE-3 (Li et al. 2025): one decoder layer over fused features of the target, fed back its own."""

from sglang_ext.drafters.eagle3.config import Eagle3Config
from sglang_ext.drafters.eagle3.module import Eagle3Drafter

__all__ = ["Eagle3Config", "Eagle3Drafter"]
