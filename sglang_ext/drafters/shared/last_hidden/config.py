"""The sizes of a drafter that drafts from one vector a request, and their form in config.json."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterConfig, DrafterOptions, check_attention, check_sizes
from sglang_ext.drafters.rope import Rope
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads
from sglang_ext.settings import Settings, build


@dataclass(frozen=True, kw_only=True)
class LayerShape(Settings):
    """Shape of a decoder layer, which is that of a layer of the target."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope

    def __post_init__(self) -> None:
        check_sizes(self)
        check_attention(self)

    def layer_json(self) -> dict[str, Any]:
        """Its fields of a config.json."""
        return {
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_json(),
        }


LAYER_SIZES = tuple(f.name for f in fields(LayerShape))


def with_rope(config: Mapping[str, Any], drafter: str) -> dict[str, Any]:
    """A config.json with `rope` beside the other sizes of its layer. Raises ValueError unless it is of one layer, and
    for a rotary embedding that drafters do not have."""
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"num_hidden_layers must be 1 for {drafter}, got {config['num_hidden_layers']}")
    return {**config, "rope": Rope.from_json(config).to_json()}


@dataclass(frozen=True, kw_only=True, repr=False)
class LastHiddenOptions(DrafterOptions):
    """`positions`: how many tokens ahead it can draft. `shared_head`: one vocabulary projection for all positions
    instead of one each."""

    positions: int = 4
    shared_head: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "drafter.")


@dataclass(frozen=True, kw_only=True)
class LastHiddenConfig(LastHiddenOptions, DrafterConfig):
    """The options, and sizes of the target."""

    hidden_size: int
    vocab_size: int
    max_position_embeddings: int = 2048

    tap_layers: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    of_target: ClassVar[tuple[str, ...]] = ("hidden_size", "vocab_size", "max_position_embeddings")

    @property
    def max_draft_steps(self) -> int:
        return self.positions

    @property
    def has_cache(self) -> bool:
        return False

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        """The fields of a checkpoint's config.json. Raises ValueError for those that are missing or do not fit."""
        if taps:
            raise ValueError(f"rayspec.target.tap_layers must be empty for this drafter, got {list(taps)}")
        missing = [name for name in (*cls.of_target, "drafter") if config.get(name) is None]
        if missing:
            raise ValueError(f"config.json has no '{missing[0]}'")
        if config["hidden_size"] != target_hidden:
            raise ValueError(f"hidden_size ({config['hidden_size']}) must equal the target's ({target_hidden})")
        options = {name: value for name, value in config["drafter"].items() if name != "kind"}
        return cls.from_options(build(cls.Options, options, "drafter"), config)

    def to_json(self) -> dict[str, Any]:
        return {
            # SGLang reads a config of every drafter; a Llama without layers costs it no cache
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.hidden_size,
            "num_hidden_layers": 0,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": self.hidden_size,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "drafter": {name: value for name, value in self.entry().items() if name != "kind"},
        }

    def heads(self, make: Callable[[], DraftHead]) -> DraftHead | PositionHeads:
        """The drafter's heads, of whatever `make` gives."""
        return make() if self.shared_head else PositionHeads([make() for _ in range(self.positions)])
