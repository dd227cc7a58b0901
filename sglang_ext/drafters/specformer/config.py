"""SpecFormer's sizes and options, and their form in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.shared.last_hidden.config import (
    LAYER_SIZES,
    LastHiddenConfig,
    LastHiddenOptions,
    LayerShape,
    with_rope,
)
from sglang_ext.drafters.target import TAPS, stored_taps


@dataclass(frozen=True, kw_only=True, repr=False)
class SpecFormerOptions(LastHiddenOptions):
    """`positions` is l_d of the paper.

    `causal` and `position_projection` are the paper's ablations: slots that see only those before them, and one
    vector for all slots, told apart by their position codes alone.
    """

    kind: ClassVar[str] = "specformer"

    positions: int = 8
    shared_head: bool = True
    causal: bool = False
    position_projection: bool = True


@dataclass(frozen=True, kw_only=True)
class SpecFormerConfig(SpecFormerOptions, LastHiddenConfig, LayerShape):
    """Shapes like those of a layer of the target. `tap_layers`: HF's `hidden_states[i]`, of which the last is the
    target's output after its final norm."""

    tap_layers: tuple[int, ...]  # type: ignore[misc]  # the target's own here, none for the others

    Options: ClassVar[type[DrafterOptions]] = SpecFormerOptions
    architecture: ClassVar[str] = "RaySpecSpecFormer"
    takes_trees: ClassVar[str] = "which is served as a chain"
    taps_output: ClassVar[bool] = True
    of_target: ClassVar[tuple[str, ...]] = (*LastHiddenConfig.of_target, *LAYER_SIZES, "tap_layers")

    @property
    def has_cache(self) -> bool:
        return True

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        if len(taps) < 2:
            raise ValueError(
                f"rayspec.target.tap_layers must be at least two layers for this drafter, got {list(taps)}"
            )
        found = stored_taps(config)
        if found != list(taps[:-1]) or config.get("num_aux_hidden_states") != len(taps):
            raise ValueError(  # SGLang reads the first two, the drafter was trained on the third
                f"taps {found} in eagle_config and num_aux_hidden_states {config.get('num_aux_hidden_states')}, but "
                f"rayspec.target.tap_layers is {list(taps)}; eagle_aux_hidden_state_layer_ids must be all but the last "
                "minus one, and num_aux_hidden_states their number with the last"
            )
        return super().from_json({**with_rope(config, "SpecFormer"), "tap_layers": taps}, target_hidden, ())

    def to_json(self) -> dict[str, Any]:
        taps = {
            "num_aux_hidden_states": len(self.tap_layers),
            # SGLang counts the layer whose output it takes; the last tap is no layer's input
            "eagle_config": {
                "use_aux_hidden_state": True,
                TAPS: [i - 1 for i in self.tap_layers[:-1]],
            },
        }
        return super().to_json() | self.layer_json() | taps


def specformer_taps(num_layers: int) -> tuple[int, ...]:
    """Embedding, middle layer, last layer's input, output: [0, L // 2, L - 1, L]. Raises ValueError for a target of
    fewer than three layers."""
    if num_layers < 3:
        raise ValueError(f"a target of {num_layers} layers has no four different taps; SpecFormer needs at least 3")
    return (0, num_layers // 2, num_layers - 1, num_layers)


Config = SpecFormerConfig
