"""Medusa's sizes and options, and their form in config.json."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.shared.last_hidden.config import LastHiddenConfig, LastHiddenOptions


@dataclass(frozen=True, kw_only=True, repr=False)
class MedusaOptions(LastHiddenOptions):
    kind: ClassVar[str] = "medusa"


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(MedusaOptions, LastHiddenConfig):
    Options: ClassVar[type[DrafterOptions]] = MedusaOptions
    architecture: ClassVar[str] = "RaySpecMedusa"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static", "slim")
    takes_trees: ClassVar[str] = "which proposes candidates and no tree"


Config = MedusaConfig
