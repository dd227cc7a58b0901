"""Hydra's sizes and options, and their form in config.json."""

from dataclasses import dataclass
from typing import Any, ClassVar

from sglang_ext.drafters.last_hidden.config import LastHiddenConfig


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LastHiddenConfig):
    """`as_published`: heads of the authors' own code, which reads the embeddings as they are and gives R_i a bias."""

    as_published: bool = False

    kind: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "RaySpecHydra"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static",)
    takes_trees: ClassVar[str] = "which reads the path, so that its candidates are not there before the tree is"

    def options(self) -> dict[str, Any]:
        """Without `as_published` where it is not: then a checkpoint is what it was before there were others."""
        return {n: v for n, v in super().options().items() if n != "as_published" or v}


Config = HydraConfig
