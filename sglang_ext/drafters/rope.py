"""Rotary embeddings of drafters: the kinds of which transformers and SGLang compute the same angles.

D = head dimension.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sglang_ext.settings import Settings, build


class Parameters(NamedTuple):
    """Parameters of one rope_type, besides rope_theta: those that it must have, and those that it may have."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return ("rope_type", "rope_theta", *self.required, *self.optional)


# Not here: `dynamic`, whose angles follow a text's length in transformers and are fixed in SGLang 0.5.23; `longrope`,
# which has two sets of angles.
ROPE_TYPES = {
    "default": Parameters(),
    "linear": Parameters(("factor",)),
    "llama3": Parameters(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": Parameters(
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Rope(Settings):
    """`rope_parameters` of a config.json, by Hugging Face's names; None where a kind has no such parameter."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        own, given = ROPE_TYPES[self.rope_type], self.to_json()
        missing = [name for name in own.required if name not in given]
        if missing:
            raise ValueError(f"{missing[0]} has no value; rope_type {self.rope_type!r} needs one")
        for name, value in given.items():
            if name not in own.names:
                raise ValueError(f"{name} is no parameter of rope_type {self.rope_type!r}; leave it out")
            if name not in ("rope_type", "truncate") and value <= 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim must be given together, or neither")

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> Self:
        """The rotary embedding of a model's config.json in any of Hugging Face's forms: `rope_parameters`, or
        `rope_scaling` with `rope_theta` beside it. What neither library reads of a kind is left out. Raises ValueError
        for a rotary embedding that drafters do not have."""
        path = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        stored = {name: value for name, value in (config.get(path) or {}).items() if value is not None}
        kind = stored.setdefault("rope_type", stored.pop("type", "default"))
        stored.pop("type", None)
        theta = stored.setdefault("rope_theta", config.get("rope_theta"))
        if theta is None:
            raise ValueError("config.json has no 'rope_theta'")
        part = stored.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise ValueError(f"partial_rotary_factor must be 1 (drafters rotate whole heads), got {part!r}")
        if kind not in list(ROPE_TYPES):
            return build(cls, {"rope_type": kind}, path)  # which refuses it, whatever stands beside it
        own = ROPE_TYPES[kind].names
        return build(cls, {n: v for n, v in stored.items() if n in own or n not in cls.__annotations__}, path)

    def to_json(self) -> dict[str, Any]:
        """`rope_parameters` of a config.json; inverse of `from_json`."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def frequencies(self, head_dim: int) -> tuple[Tensor, float]:
        """(radians a position of each pair of dimensions, float32 [D / 2] on the CPU; factor of sine and cosine)."""
        return _frequencies(self, head_dim)


@cache
def _frequencies(rope: Rope, head_dim: int) -> tuple[Tensor, float]:
    half = head_dim // 2
    if rope.rope_type == "default":  # transformers has a function for it in each model, and none for all
        return rope.rope_theta ** (-torch.arange(half, device="cpu", dtype=torch.float32) / half), 1.0
    from transformers import LlamaConfig  # seconds, which a drafter of the default kind should not wait for
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=rope.to_json())
    return ROPE_INIT_FUNCTIONS[rope.rope_type](config, torch.device("cpu"))
