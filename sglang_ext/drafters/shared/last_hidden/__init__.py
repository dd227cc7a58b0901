"""What drafters share that draft from one vector a request; no family by itself."""

from sglang_ext.drafters.shared.last_hidden.config import LastHiddenConfig
from sglang_ext.drafters.shared.last_hidden.module import Context, LastHiddenDrafter

__all__ = ["Context", "LastHiddenConfig", "LastHiddenDrafter"]
