"""SpecFormer as a plain torch module: every draft position from one pass over the target's features.

I   = W_D norm(taps)                 the taps' norm is over each tap alone (grouped RMSNorm)
I_D = I + MSA(norm(I))               causal over the context, rotary, with a cache of its own
D_i = W_i norm(I_D) + b_i            a matrix and a learned position code for each draft position
E   = D + SA(norm(D))                over the positions of one draft, bidirectional, not rotary
E   = E + SwiGLU(norm(E))            the head reads norm(E_i)

B = sequences, T = tokens, N = rows, H = hidden size of the target, K = draft positions ("slots"), J = those asked for.

Slot i of token x_t predicts x_{t+2+i}: the target has named x_{t+1} by then. In decoding the context layer runs over
what the target has just verified, and the slots of the last accepted token are the next draft, so that a step has one
drafter call however long the draft.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from rayspec_kernels.grouped_rmsnorm import grouped_rmsnorm
from sglang_ext.drafters.attention import Attention
from sglang_ext.drafters.eagle3 import RMSNorm, SwiGLU, stored_taps
from sglang_ext.drafters.last_hidden import LastHiddenConfig, LastHiddenDrafter


@dataclass(frozen=True, kw_only=True)
class SpecFormerConfig(LastHiddenConfig):
    """Shapes like those of a layer of the target. `positions` is l_d of the paper.

    `causal` and `position_projection` are the paper's ablations: slots that see only those before them, and one
    vector for all slots, told apart by their position codes alone. `tap_layers`: HF's `hidden_states[i]`, of which the
    last is the target's output after its final norm.
    """

    positions: int = 8
    shared_head: bool = True
    causal: bool = False
    position_projection: bool = True
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tap_layers: tuple[int, ...]  # type: ignore[misc]  # the target's own here, none for the others

    of_target: ClassVar[tuple[str, ...]] = (
        *LastHiddenConfig.of_target,
        *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
        *("rope_theta", "tap_layers"),
    )

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
        if config.get("num_hidden_layers", 1) != 1:
            raise ValueError(f"num_hidden_layers must be 1 for SpecFormer, got {config['num_hidden_layers']}")
        return super().from_json({**config, **_rope(config), "tap_layers": taps}, target_hidden, ())

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "num_aux_hidden_states": len(self.tap_layers),
            # SGLang counts the layer whose output it takes; the last tap is no layer's input
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in self.tap_layers[:-1]],
            },
        }


def _rope(config: Mapping[str, Any]) -> dict[str, float]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"rope_type must be 'default', got {rope['rope_type']!r}")
    theta = rope.get("rope_theta")
    return {} if theta is None else {"rope_theta": theta}


def specformer_taps(num_layers: int) -> tuple[int, ...]:
    """Embedding, middle layer, last layer's input, output: [0, L // 2, L - 1, L]. Raises ValueError for a target of
    fewer than three layers."""
    if num_layers < 3:
        raise ValueError(f"a target of {num_layers} layers has no four different taps; SpecFormer needs at least 3")
    return (0, num_layers // 2, num_layers - 1, num_layers)


class SpecFormerDrafter(LastHiddenDrafter):
    """What a request carries between steps is I_D of its last accepted token; `begin` makes the slots of it."""

    kind = "specformer"
    Config = SpecFormerConfig
    reads_path = False
    config: SpecFormerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        H, K, width = c.hidden_size, c.positions, len(c.tap_layers) * c.hidden_size
        norm: Callable[[], RMSNorm] = lambda: RMSNorm(H, c.rms_norm_eps)  # noqa: E731
        self.tap_norm = RMSNorm(width, c.rms_norm_eps)  # its weight; the statistics are each tap's
        self.fc = nn.Linear(width, H, bias=False)
        self.context_norm = norm()
        self.context_attn: nn.Module | None = Attention(c)  # None where SGLang's own attention stands in
        self.position_norm = norm()
        if c.position_projection:
            self.position_proj = nn.Linear(H, K * H, bias=False)
        self.position_code = nn.Parameter(torch.zeros(K, H))
        self.slot_norm = norm()
        self.slot_attn = Attention(c)
        self.mlp_norm = norm()
        self.mlp = SwiGLU(H, c.intermediate_size)
        self.norm = norm()

    def fuse(self, taps_NG: Tensor) -> Tensor:
        """I [N, H] of the concatenated taps [N, taps * H]."""
        weight_G = self.tap_norm.weight.to(taps_NG.dtype)
        groups = len(self.config.tap_layers)
        return self.fc(grouped_rmsnorm(taps_NG, weight_G, groups, self.config.rms_norm_eps))

    def context(self, taps_BTG: Tensor) -> Tensor:
        """I_D [B, T, H] of whole sequences, without a cache."""
        B, T, G = taps_BTG.shape
        I_BTH = self.fuse(taps_BTG.reshape(B * T, G)).view(B, T, -1)
        positions_BT = torch.arange(T, device=taps_BTG.device).expand(B, T)
        assert self.context_attn is not None, "SGLang serves it"
        return I_BTH + self.context_attn(self.context_norm(I_BTH), causal=True, positions_BT=positions_BT)

    def slots(self, context_NH: Tensor, num_slots: int | None = None) -> Tensor:
        """norm(E) [N, J, H] of the first `num_slots` (None: all) slots of each row's draft."""
        c = self.config
        N, H = context_NH.shape
        x_NH = self.position_norm(context_NH)
        D_NKH = self.position_proj(x_NH).view(N, c.positions, H) if c.position_projection else x_NH[:, None]
        D_NKH = D_NKH + self.position_code.to(D_NKH.dtype)
        E_NKH = D_NKH + self.slot_attn(self.slot_norm(D_NKH), causal=c.causal)
        E_NJH = E_NKH[:, :num_slots]
        return self.norm(E_NJH + self.mlp(self.mlp_norm(E_NJH)))

    def begin(self, hidden_TH: Tensor, num_steps: int) -> Tensor:
        return self.slots(hidden_TH, num_steps)

    def state(self, step: int, hidden_TH: Tensor, path_TdH: Tensor | None) -> Tensor:
        return hidden_TH

    def parts(self, step: int) -> list[nn.Module]:
        """The SwiGLU, which alone runs for no more slots than are asked for."""
        return [self.mlp]
