"""Medusa (Cai et al. 2024): a residual block for each draft position, from the target's last hidden state."""

from sglang_ext.drafters.medusa.config import MedusaConfig
from sglang_ext.drafters.medusa.module import MedusaDrafter

__all__ = ["MedusaConfig", "MedusaDrafter"]
