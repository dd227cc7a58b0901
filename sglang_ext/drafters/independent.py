"""An independent drafter: a small Llama with a token embedding and a width of its own, and any draft head.

B = sequences, T = slots, H = drafter hidden size, A = query heads, K = key/value heads, D = head dimension.

It reads tokens and nothing of the target, so that a drafted token is one more token to it: every step of a draft is the
same pass as over known text. SGLang's STANDALONE shows it a text without its first token, as it does EAGLE's drafters:
slot t holds x_{t+1} and predicts x_{t+2}. State-dict names are those of Hugging Face's Llama.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from sglang_ext.drafters.attention import Attention
from sglang_ext.drafters.eagle3 import RMSNorm, SwiGLU
from sglang_ext.drafters.options import DrafterOptions, check_sizes
from sglang_ext.heads import DraftHead
from sglang_ext.settings import check_type
from sglang_ext.trees import CandidateTree


@dataclass(frozen=True, kw_only=True)
class IndependentConfig(DrafterOptions):
    """Shapes of the body. The defaults have 0.14 million parameters besides the rows of embedding and head, 64 numbers
    each; 64 is also the `head_dim` that every attention backend has."""

    vocab_size: int
    max_position_embeddings: int = 2048
    hidden_size: int = 64
    num_layers: int = 2
    num_attention_heads: int = 2
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 192
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    tap_layers: ClassVar[tuple[int, ...]] = ()
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

    def __post_init__(self) -> None:
        check_sizes(self, "drafter.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"drafter.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"drafter.num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"drafter.head_dim must be even (rotary halves), got {self.head_dim}")

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
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type must be 'default', got {rope['rope_type']!r}")
        values = {**config, **rope}
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
        rope = {"rope_type": "default", "rope_theta": shapes.pop("rope_theta")}
        return {**self.json_fixed, **shapes, "rope_parameters": rope, "dtype": "bfloat16"}

    def heads(self, make: Callable[[], DraftHead]) -> DraftHead:
        """The drafter's head, of whatever `make` gives: one for all draft steps."""
        return make()


class Layer(nn.Module):
    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor) -> Tensor:
        B, T, _ = x_BTH.shape
        positions_BT = torch.arange(T, device=x_BTH.device).expand(B, -1)
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), causal=True, positions_BT=positions_BT)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Body(nn.Module):
    def __init__(self, config: IndependentConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class IndependentDrafter(nn.Module):
    """The body (`model`) and its head (`lm_head`). A head that routes is given the embedding of each row's token for
    both of its inputs: it is all that is known before the layers have run."""

    kind: ClassVar[str] = "independent"
    Config: ClassVar[type[IndependentConfig]] = IndependentConfig

    def __init__(self, config: IndependentConfig, head: DraftHead) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = head
        self.draft_tree: CandidateTree | None = None  # of what it expands EAGLE-2 chooses

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """What the head reads at every slot, [B, T, H]: of the tokens up to the slot's own."""
        x_BTH = self.embed(ids_BT)
        for layer in self.model.layers:
            x_BTH = layer(x_BTH)
        return self.model.norm(x_BTH)
