"""The EAGLE-1 and 2 drafter as a plain torch module (Li et al. 2024): one decoder layer that foresees features.

B = sequences, T = slots, H = hidden size of target and drafter.

A feature is the target's last hidden state after its final norm, which its LM head reads. Slot t holds the feature of
x_t and the embedding of x_{t+1}; its output stands for the feature of x_{t+1}, from which the head predicts x_{t+2} and
the next step goes on. As published the layer has no norm before its attention, and none follows it. State-dict names
are those of the published checkpoints.
"""

import torch
from torch import Tensor, nn

from sglang_ext.drafters.eagle.config import EagleConfig
from sglang_ext.drafters.layers import RMSNorm, SwiGLU
from sglang_ext.drafters.shared.features.module import Cache, FeatureAttention, FeatureDrafter
from sglang_ext.heads import DraftHead
from sglang_ext.trees import CandidateTree


class EagleLayer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.self_attn = FeatureAttention(config, config.hidden_size)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor, positions_BT: Tensor, cache: Cache) -> Tensor:
        x_BTH = x_BTH + self.self_attn(x_BTH, positions_BT, cache)
        return x_BTH + self.mlp(self.post_attention_layernorm(x_BTH))


class EagleDrafter(FeatureDrafter):
    """The drafter's body (`fc`, `layers`) and its head (`lm_head`). `draft_tree` chooses what is verified of the tree
    that it expands."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, head: DraftHead, draft_tree: CandidateTree | None = None) -> None:
        super().__init__(config, head, draft_tree)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(config)])

    def fuse(self, last_hidden_BTH: Tensor) -> Tensor:
        return last_hidden_BTH

    def step(self, embed_BTH: Tensor, feature_BTH: Tensor, positions_BT: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        x_BTH = self.fc(torch.cat([embed_BTH, feature_BTH], dim=-1))
        feature_BTH = self.layers[0](x_BTH, positions_BT, cache)
        return feature_BTH, feature_BTH


Drafter = EagleDrafter
