"""An independent drafter: a small Llama of its own width, which reads tokens alone."""

from sglang_ext.drafters.independent.config import IndependentConfig
from sglang_ext.drafters.independent.module import IndependentDrafter

__all__ = ["IndependentConfig", "IndependentDrafter"]
