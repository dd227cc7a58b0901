"""Hydra's sizes and options, and their form in config.json."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.drafters.last_hidden.config import LastHiddenConfig


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LastHiddenConfig):
    kind: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "RaySpecHydra"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static",)
    takes_trees: ClassVar[str] = "which reads the path, so that its candidates are not there before the tree is"


Config = HydraConfig
