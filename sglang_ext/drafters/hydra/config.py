"""Hydra's sizes and options, and their form in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from sglang_ext.drafters.last_hidden.config import LAYER_SIZES, LastHiddenConfig, LayerShape, with_rope
from sglang_ext.settings import build


@dataclass(frozen=True, kw_only=True)
class HydraConfig(LastHiddenConfig):
    """`prefix_layer` and `mlp_layers` above 1 (the paper's is 4) are Hydra++'s: a decoder layer over the target's last
    hidden states, of which the heads read the output, and further layers of each head's MLP. `layer`: its shape, a
    target layer's; None where there is none.

    `as_published`: heads of the authors' own code, which reads the embeddings as they are and gives R_i a bias.
    """

    as_published: bool = False
    prefix_layer: bool = False
    mlp_layers: int = 1
    layer: LayerShape | None = None

    kind: ClassVar[str] = "hydra"
    architecture: ClassVar[str] = "RaySpecHydra"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static",)
    takes_trees: ClassVar[str] = "which reads the path, so that its candidates are not there before the tree is"

    @property
    def has_cache(self) -> bool:
        return self.prefix_layer

    @classmethod
    def from_options(cls, options: Mapping[str, Any], sizes: Mapping[str, Any]) -> Self:
        """The config from options. With a prefix layer the sizes are those of a layer, too; where they are not there,
        `layer` is None, and no drafter can be made of it."""
        has_layer = options.get("prefix_layer") is True and all(name in sizes for name in LAYER_SIZES)
        given = {name: sizes[name] for name in cls.of_target}
        given["layer"] = {name: sizes[name] for name in LAYER_SIZES} if has_layer else None
        return build(cls, options, "drafter", given=given)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        if (config.get("drafter") or {}).get("prefix_layer") is True:
            config = with_rope(config, "a Hydra drafter with a prefix layer")
            missing = [name for name in LAYER_SIZES if config.get(name) is None]
            if missing:
                raise ValueError(f"config.json has no '{missing[0]}'")
        return super().from_json(config, target_hidden, taps)

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | ({} if self.layer is None else self.layer.layer_json())

    def options(self) -> dict[str, Any]:
        """Without those that are at their defaults and came later than others, so that a checkpoint and what it was
        asked for are what they were before."""
        later = {f.name: f.default for f in fields(self) if f.name in ("as_published", "prefix_layer", "mlp_layers")}
        kept = {n: v for n, v in super().options().items() if n != "layer"}
        return {n: v for n, v in kept.items() if n not in later or v != later[n]}


Config = HydraConfig
