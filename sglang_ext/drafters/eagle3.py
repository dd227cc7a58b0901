"""The EAGLE-3 drafter as a plain torch module (Li et al. 2025): one decoder layer over fused target features.

B = sequences, T = slots, H = drafter hidden size, G = target hidden size, A = query heads, K = key/value heads,
D = head dimension.

Slot t holds the target feature of token x_t and the embedding of x_{t+1}; its output predicts x_{t+2}. The token
embedding is the target's, frozen and not part of the drafter. State-dict names are those of stock EAGLE-3 checkpoints.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ext.drafters.options import check_sizes
from sglang_ext.heads import DraftHead
from sglang_ext.settings import check_type
from sglang_ext.trees import CandidateTree, PruningTree


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
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
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even (rotary halves), got {self.head_dim}")
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
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type must be 'default', got {rope['rope_type']!r}")
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
                rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
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
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
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

    def heads(self, make: Callable[[], DraftHead]) -> DraftHead:
        """The drafter's head, of whatever `make` gives: one for all draft steps."""
        return make()


DEFAULT_TAPS = 3


def stored_taps(config: Mapping[str, Any]) -> list[int]:
    """The tapped layers that a config.json names for SGLang. Raises ValueError where they are no whole numbers."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"eagle_config.eagle_aux_hidden_state_layer_ids must be a list of layers, got {ids!r}")
    return [i + 1 for i in ids]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's taps [2, L//2, L-3], which are SGLang's default. Raises ValueError where they are not three different
    layers inside the target."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not 0 < taps[0] < taps[1] < taps[2] < num_layers:
        raise ValueError(
            f"a target of {num_layers} layers has no three different default taps (got {list(taps)}); "
            "EAGLE-3 needs at least 8 layers here, or tap_layers named explicitly"
        )
    return taps


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotate(x_BTAD: Tensor, positions_BT: Tensor, theta: float) -> Tensor:
    """Rotary embedding over half-split dimensions (the Llama layout), computed in float32."""
    half = x_BTAD.shape[-1] // 2
    inv_freq = theta ** (-torch.arange(half, device=x_BTAD.device, dtype=torch.float32) / half)
    angle = positions_BT[..., None, None].float() * inv_freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x_BTAD.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BTAD.dtype)


class Eagle3Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(2 * c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BT2H: Tensor, positions_BT: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one training-time-test step; appends this step's (k, v) [B, T, A, D] to `cache`.

        Slot t sees the slots 0..t of the first step (true features) and slot t itself of every later step.
        """
        c = self.config
        B, T, _ = x_BT2H.shape
        groups = c.num_attention_heads // c.num_key_value_heads
        q_BTAD = rotate(self.q_proj(x_BT2H).view(B, T, -1, c.head_dim), positions_BT, c.rope_theta)
        k_BTKD = rotate(self.k_proj(x_BT2H).view(B, T, -1, c.head_dim), positions_BT, c.rope_theta)
        v_BTKD = self.v_proj(x_BT2H).view(B, T, -1, c.head_dim)
        cache.append((k_BTKD.repeat_interleave(groups, dim=2), v_BTKD.repeat_interleave(groups, dim=2)))

        (first_k, first_v), later = cache[0], cache[1:]
        if not later:
            out = F.scaled_dot_product_attention(
                q_BTAD.transpose(1, 2), first_k.transpose(1, 2), first_v.transpose(1, 2), is_causal=True
            )
            return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))

        scale = c.head_dim**-0.5
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=q_BTAD.device).tril()
        scores_BATT = torch.einsum("btad,bsad->bats", q_BTAD, first_k) * scale
        scores_BATT = scores_BATT.masked_fill(~causal_TT, float("-inf"))
        own_BATn = torch.stack([(q_BTAD * k).sum(-1).transpose(1, 2) * scale for k, _ in later], dim=-1)
        weights = torch.cat([scores_BATT, own_BATn], dim=-1).float().softmax(dim=-1).to(q_BTAD.dtype)
        out_BTAD = torch.einsum("bats,bsad->btad", weights[..., :T], first_v)
        for i, (_, v) in enumerate(later):
            out_BTAD = out_BTAD + weights[..., T + i].transpose(1, 2)[..., None] * v
        return self.o_proj(out_BTAD.reshape(B, T, -1))


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        x_BT2H = torch.cat([self.input_layernorm(embed_BTH), self.hidden_norm(feature_BTH)], dim=-1)
        x_BTH = feature_BTH + self.self_attn(x_BT2H, positions_BT, cache)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Eagle3Drafter(nn.Module):
    """The drafter's body (`fc`, `midlayer`, `norm`) and its head (`lm_head`). `draft_tree` chooses what is verified of
    the tree that it expands; None for EAGLE-2's own choice, the likeliest nodes."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[Eagle3Config]] = Eagle3Config

    def __init__(self, config: Eagle3Config, head: DraftHead, draft_tree: CandidateTree | None = None) -> None:
        super().__init__()
        if draft_tree is not None and not isinstance(draft_tree, PruningTree):
            raise ValueError(
                f"draft_tree of kind '{draft_tree.kind}' needs a tree before anything is drafted, but an EAGLE-3 "
                "drafter expands its tree as it drafts; use draft_tree.kind 'slim', which chooses from it, or take "
                "draft_tree out for EAGLE-2's choice"
            )
        self.config = config
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = head
        self.draft_tree = draft_tree

    def fuse(self, taps_BTG: Tensor) -> Tensor:
        """First feature [B, T, H] from the concatenated taps [B, T, taps * G]."""
        return self.fc(taps_BTG)

    def step(
        self,
        embed_BTH: Tensor,
        feature_BTH: Tensor,
        positions_BT: Tensor,
        cache: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """One pass of the layer: (hidden for the head [B, T, H], feature for the next step [B, T, H]).

        `positions_BT` is t + i at slot t of step i; `cache` starts empty and collects one (k, v) a step.
        """
        feature_BTH = self.midlayer(embed_BTH, feature_BTH, positions_BT, cache)
        return self.norm(feature_BTH), feature_BTH
