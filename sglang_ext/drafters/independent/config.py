"""The independent drafter's sizes, and their form in config.json: that of Hugging Face's Llama."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from sglang_ext.drafters.base import DrafterConfig, DrafterOptions, check_attention, check_sizes
from sglang_ext.drafters.rope import Rope
from sglang_ext.settings import check_type


@dataclass(frozen=True, kw_only=True, repr=False)
class IndependentOptions(DrafterOptions):
    """The defaults have 0.14 million parameters besides the rows of embedding and head, 64 numbers each; 64 is also the
    `head_dim` that every attention backend has."""

    kind: ClassVar[str] = "independent"

    hidden_size: int = 64
    num_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 192
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_sizes(self, "drafter.")
        check_attention(self, "drafter.")


@dataclass(frozen=True, kw_only=True)
class IndependentConfig(IndependentOptions, DrafterConfig):
    """Shapes of the body: the options, and sizes of the target."""

    vocab_size: int
    max_position_embeddings: int = 2048

    tap_layers: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]
    Options: ClassVar[type[DrafterOptions]] = IndependentOptions
    architecture: ClassVar[str] = "RaySpecIndependent"
    takes_trees: ClassVar[str] = "which builds its tree as it drafts"
    expands_tree: ClassVar[bool] = True
    reads_target: ClassVar[bool] = False
    of_target: ClassVar[tuple[str, ...]] = ("vocab_size", "max_position_embeddings")
    json_names: ClassVar[dict[str, str]] = {"num_layers": "num_hidden_layers"}  # where Hugging Face's differ
    # what a Llama may have beside and this one has not; SGLang would follow the config
    json_fixed: ClassVar[dict[str, Any]] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }

    @property
    def rope(self) -> Rope:
        return Rope(rope_theta=self.rope_theta)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_hidden: int, taps: tuple[int, ...]) -> Self:
        """The fields of a checkpoint's config.json. Raises ValueError for those that are missing or do not fit."""
        if taps:
            raise ValueError(f"rayspec.target.tap_layers must be empty for this drafter, got {list(taps)}")
        for name, value in cls.json_fixed.items():
            if config.get(name, value) != value:
                raise ValueError(
                    f"{name} must be {value!r} for an independent drafter, got {config[name]!r}; correct config.json, "
                    "or export the drafter again with rayspec train"
                )
        rope = Rope.from_json(config)
        if rope.rope_type != "default":  # the drafter's own, whatever the target's
            raise ValueError(
                f"rope_type must be 'default' for an independent drafter, got {rope.rope_type!r}; correct config.json, "
                "or export the drafter again with rayspec train"
            )
        values = {**config, "rope_theta": rope.rope_theta}
        found = {}
        for f in fields(cls):
            stored = cls.json_names.get(f.name, f.name)
            if stored not in values:
                raise ValueError(f"config.json has no '{stored}'")
            check_type(stored, values[stored], f.type)
            found[f.name] = values[stored]
        return cls(**found)

    def to_json(self) -> dict[str, Any]:
        """The fields of config.json that describe the body; inverse of `from_json`."""
        shapes = {self.json_names.get(name, name): value for name, value in asdict(self).items()}
        del shapes["rope_theta"]
        return {**self.json_fixed, **shapes, "rope_parameters": self.rope.to_json(), "dtype": "bfloat16"}


Config = IndependentConfig
