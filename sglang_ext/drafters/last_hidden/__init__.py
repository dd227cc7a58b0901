"""What drafters share that draft from one vector a request; no family by itself."""

from sglang_ext.drafters.last_hidden.config import LastHiddenConfig
from sglang_ext.drafters.last_hidden.module import LastHiddenDrafter

__all__ = ["LastHiddenConfig", "LastHiddenDrafter"]
