"""The EAGLE-3 drafter's sizes, and their form in config.json: that of stock EAGLE-3 checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterConfig, check_attention, check_sizes
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.target import DEFAULT_TAPS, stored_taps
from sglang_ext.settings import check_type


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DrafterConfig):
    """Shapes of the drafter's body. `tap_layers`: the target layers whose *input* is tapped (HF `hidden_states[i]`);
    None, of a stock drafter that names none, for the three of `default_taps`, which its target's depth decides."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tap_layers: tuple[int, ...] | None
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    max_position_embeddings: int = 2048

    kind: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = "RaySpecEagle3"
    of_target: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "tap_layers", "rms_norm_eps", "rope", "max_position_embeddings"),
    )
    tree_kinds: ClassVar[tuple[str, ...]] = ("slim",)
    takes_trees: ClassVar[str] = "which builds its tree as it drafts, so that only what chooses from that one fits"
    expands_tree: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = True
    has_stock_form: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes(self)
        check_attention(self)
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must equal the target's ({self.target_hidden_size}): "
                "the drafter uses the target's token embedding"
            )

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
        if config.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers must be 1 for EAGLE-3, got {config['num_hidden_layers']}")
        for name in ("hidden_size", "num_attention_heads"):  # of which the head_dim may have to be made
            check_type(name, config.get(name), int)
        try:
            return cls(
                hidden_size=config["hidden_size"],
                target_hidden_size=target_hidden,
                intermediate_size=config["intermediate_size"],
                num_attention_heads=config["num_attention_heads"],
                num_key_value_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // max(1, config["num_attention_heads"]),
                vocab_size=config["vocab_size"],
                tap_layers=taps,
                rms_norm_eps=config["rms_norm_eps"],
                rope=Rope.from_json({"rope_theta": 10000.0, **config}),
                max_position_embeddings=config["max_position_embeddings"],
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}") from missing

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json that describe the body; inverse of `from_json`."""
        assert self.tap_layers is not None, "a drafter that is written knows its target"
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": self.rope.to_json(),
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            # SGLang counts the layer whose output it takes, we the layer whose input it is
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.tap_layers],
            },
        }

    @staticmethod
    def own_name(name: str) -> str:
        """The one layer has two names in use."""
        return name.replace("layers.0.", "midlayer.")


Config = Eagle3Config
