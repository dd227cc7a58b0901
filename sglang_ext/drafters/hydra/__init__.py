"""Hydra (Ankner et al. 2024): Medusa's heads, each of which also reads the tokens drafted before it."""

from sglang_ext.drafters.hydra.config import HydraConfig
from sglang_ext.drafters.hydra.module import HydraDrafter

__all__ = ["HydraConfig", "HydraDrafter"]
