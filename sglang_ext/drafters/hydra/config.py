"""Hydra's sizes and options, and their form in config.json."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.shared.last_hidden.config import (
    LAYER_SIZES,
    LastHiddenConfig,
    LastHiddenOptions,
    LayerShape,
    with_rope,
)
from sglang_ext.settings import build


@dataclass(frozen=True, kw_only=True, repr=False)
class HydraOptions(LastHiddenOptions):
    """`prefix_layer` and `mlp_layers` above 1 (the paper's is 4) are Hydra++'s: a decoder layer over the target's last
    hidden states, of which the heads read the output, and further layers of each head's MLP.

    `as_published`: heads of the authors' own code, which reads the embeddings as they are and gives R_i a bias.
    """

    as_published: bool = False
    prefix_layer: bool = False
    mlp_layers: int = 1

    kind: ClassVar[str] = "hydra"
    added: ClassVar[frozenset[str]] = frozenset({"as_published", "prefix_layer", "mlp_layers"})


@dataclass(frozen=True, kw_only=True)
class HydraConfig(HydraOptions, LastHiddenConfig):
    """`layer`: the shape of the prefix layer, a target layer's; None where there is none."""

    layer: LayerShape | None = None

    Options: ClassVar[type[DrafterOptions]] = HydraOptions
    architecture: ClassVar[str] = "RaySpecHydra"
    tree_kinds: ClassVar[tuple[str, ...]] = ("static",)
    takes_trees: ClassVar[str] = "which reads the path, so that its candidates are not there before the tree is"

    @property
    def has_cache(self) -> bool:
        return self.prefix_layer

    @classmethod
    def from_options(cls, options: DrafterOptions, sizes: Mapping[str, Any]) -> Self:
        """The config from options. With a prefix layer the sizes are those of a layer, too; where they are not there,
        `layer` is None, and no drafter can be made of it."""
        assert isinstance(options, HydraOptions), "its own"
        has_layer = options.prefix_layer and all(name in sizes for name in LAYER_SIZES)
        given = {name: sizes[name] for name in cls.of_target}
        given["layer"] = {name: sizes[name] for name in LAYER_SIZES} if has_layer else None
        return build(cls, asdict(options), "drafter", given=given)

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


Config = HydraConfig
