"""The EAGLE drafter's sizes, and their form in config.json: that of published EAGLE-1 and 2 checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.shared.features.config import FeatureConfig
from sglang_ext.drafters.stock import EAGLE, StockForm
from sglang_ext.drafters.target import stored_taps


@dataclass(frozen=True, kw_only=True, repr=False)
class EagleOptions(DrafterOptions):
    kind: ClassVar[str] = "eagle"


@dataclass(frozen=True, kw_only=True)
class EagleConfig(EagleOptions, FeatureConfig):
    """Shapes of the drafter's body, which taps no layer: it reads what the target's LM head reads."""

    tap_layers: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    Options: ClassVar[type[DrafterOptions]] = EagleOptions
    architecture: ClassVar[str] = "RaySpecEagle"
    stock: ClassVar[StockForm | None] = EAGLE

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        """The fields of a checkpoint's config.json. Raises ValueError for those that are missing or do not fit."""
        found = stored_taps(config)
        if taps or found:
            raise ValueError(
                f"rayspec.target.tap_layers and eagle_config must name no layers for this drafter, got {list(taps)} "
                f"and {found}; a drafter that taps layers is of kind eagle3"
            )
        if config.get("bias", True) is not True:
            raise ValueError(f"bias must be true, as SGLang computes fc, got {config['bias']!r}; correct config.json")
        return cls.from_layer(config, target_hidden)

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json that describe the body; inverse of `from_json`."""
        return super().to_json() | {"bias": True}


Config = EagleConfig
