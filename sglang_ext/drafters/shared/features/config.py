"""The sizes of a drafter of one decoder layer over features, and their form in config.json: Hugging Face's Llama."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterConfig, check_attention, check_sizes
from sglang_ext.drafters.rope import Rope
from sglang_ext.settings import check_type


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(DrafterConfig):
    """Shapes of the drafter's body."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope: Rope = field(default_factory=Rope)
    max_position_embeddings: int = 2048

    of_target: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "rms_norm_eps", "rope", "max_position_embeddings"),
    )
    tree_kinds: ClassVar[tuple[str, ...]] = ("slim",)
    takes_trees: ClassVar[str] = "which builds its tree as it drafts, so that only what chooses from that one fits"
    expands_tree: ClassVar[bool] = True
    feeds_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_sizes(self)
        check_attention(self)
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must equal the target's ({self.target_hidden_size}): "
                "the drafter uses the target's token embedding"
            )

    @classmethod
    def from_layer(cls, config: Mapping[str, Any], target_hidden: int, **taps: Any) -> Self:
        """The fields of a checkpoint's config.json that describe the layer. Raises ValueError for those that are
        missing or do not fit."""
        if config.get("num_hidden_layers", 1) != 1:
            raise ValueError(
                f"num_hidden_layers must be 1 for a drafter of kind {cls.kind}, got {config['num_hidden_layers']}"
            )
        for name in ("hidden_size", "num_attention_heads"):  # the head_dim may have to be made of these
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
                rms_norm_eps=config["rms_norm_eps"],
                rope=Rope.from_json({"rope_theta": 10000.0, **config}),
                max_position_embeddings=config["max_position_embeddings"],
                **taps,
            )
        except KeyError as missing:
            raise ValueError(f"config.json has no {missing}") from missing

    def to_json(self) -> dict[str, Any]:
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
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
