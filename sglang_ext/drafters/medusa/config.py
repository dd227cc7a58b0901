"""Medusa's sizes and options, and their form in config.json."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.drafters.last_hidden.config import LastHiddenConfig


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(LastHiddenConfig):
    kind: ClassVar[str] = "medusa"
    architecture: ClassVar[str] = "RaySpecMedusa"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static", "slim")
    takes_trees: ClassVar[str] = "which proposes candidates and no tree"


Config = MedusaConfig
