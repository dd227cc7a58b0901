"""The EAGLE-3 drafter as a plain torch module (Li et al. 2025): one decoder layer over fused target features.

B = sequences, T = slots, H = drafter hidden size, G = target hidden size.

Slot t holds the target feature of token x_t and the embedding of x_{t+1}; its output predicts x_{t+2}. The token
embedding is the target's, frozen and not part of the drafter. State-dict names are those of stock EAGLE-3 checkpoints.
"""

import torch
from torch import Tensor, nn

from sglang_ext.drafters.eagle3.config import Eagle3Config
from sglang_ext.drafters.layers import RMSNorm, SwiGLU
from sglang_ext.drafters.shared.features.module import Cache, FeatureAttention, FeatureDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.trees import CandidateTree


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = FeatureAttention(config, 2 * config.hidden_size)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: Cache) -> Tensor:
        x_BT2H = torch.cat([self.input_layernorm(embed_BTH), self.hidden_norm(feature_BTH)], dim=-1)
        x_BTH = feature_BTH + self.self_attn(x_BT2H, positions_BT, cache)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class Eagle3Drafter(FeatureDrafter):
    """The drafter's body (`fc`, `midlayer`, `norm`) and its head (`lm_head`). `draft_tree` chooses what is verified of
    the tree that it expands."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, head: DraftHead, draft_tree: CandidateTree | None = None) -> None:
        super().__init__(config, head, draft_tree)
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def fuse(self, taps_BTG: Tensor) -> Tensor:
        """First feature [B, T, H] from the concatenated taps [B, T, taps * G]."""
        return self.fc(taps_BTG)

    def step(self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        feature_BTH = self.midlayer(embed_BTH, feature_BTH, positions_BT, cache)
        return self.norm(feature_BTH), feature_BTH


Drafter = Eagle3Drafter
