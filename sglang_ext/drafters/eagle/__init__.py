"""EAGLE-1 and 2 (Li et al. 2024, arXiv 2401.15077 and 2406.16858): one decoder layer that foresees the target's last
hidden state."""

from sglang_ext.drafters.eagle.config import EagleConfig
from sglang_ext.drafters.eagle.module import EagleDrafter

__all__ = ["EagleConfig", "EagleDrafter"]
