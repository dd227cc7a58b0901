"""The EAGLE-3 drafter's sizes, and their form in config.json: that of stock EAGLE-3 checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.shared.features.config import FeatureConfig
from sglang_ext.drafters.stock import EAGLE3, StockForm
from sglang_ext.drafters.target import DEFAULT_TAPS, TAPS, stored_taps


@dataclass(frozen=True, kw_only=True, repr=False)
class Eagle3Options(DrafterOptions):
    kind: ClassVar[str] = "eagle3"


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(Eagle3Options, FeatureConfig):
    """Shapes of the drafter's body. `tap_layers`: the target layers whose *input* is tapped (HF `hidden_states[i]`);
    None, of a stock drafter that names none, for the three of `default_taps`, which its target's depth decides."""

    tap_layers: tuple[int, ...] | None

    Options: ClassVar[type[DrafterOptions]] = Eagle3Options
    architecture: ClassVar[str] = "RaySpecEagle3"
    of_target: ClassVar[tuple[str, ...]] = (*FeatureConfig.of_target, "tap_layers")
    stock: ClassVar[StockForm | None] = EAGLE3

    @property
    def num_taps(self) -> int:
        return DEFAULT_TAPS if self.tap_layers is None else len(self.tap_layers)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...] | None) -> Self:
        """The fields of a checkpoint's config.json. Raises ValueError for those that are missing or do not fit."""
        found = stored_taps(config)
        if found != list(taps or ()):  # SGLang reads the first, the drafter was trained on the second
            raise ValueError(
                f"taps {found} in eagle_config, but rayspec.target.tap_layers is {list(taps or ())}; "
                "eagle_aux_hidden_state_layer_ids must be the tapped layers minus one"
            )
        asked = config.get("num_aux_hidden_states") or DEFAULT_TAPS
        if taps is None and asked != DEFAULT_TAPS:
            raise ValueError(
                f"num_aux_hidden_states is {asked}, but eagle_config names no layers, and SGLang's default are "
                f"{DEFAULT_TAPS}; add eagle_aux_hidden_state_layer_ids (tapped layer minus one) to config.json"
            )
        return cls.from_layer(config, target_hidden, tap_layers=taps)

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json that describe the body; inverse of `from_json`."""
        assert self.tap_layers is not None, "a drafter that is written knows its target"
        return super().to_json() | {
            "draft_vocab_size": self.vocab_size,
            # SGLang counts the layer whose output it takes, we the layer whose input it is
            "eagle_config": {
                "use_aux_hidden_state": True,
                TAPS: [i - 1 for i in self.tap_layers],
            },
        }

    @staticmethod
    def own_name(name: str) -> str:
        """The one layer has two names in use."""
        return name.replace("layers.0.", "midlayer.")


Config = Eagle3Config
