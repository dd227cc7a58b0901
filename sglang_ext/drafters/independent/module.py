"""An independent drafter: a small Llama with a token embedding and a width of its own, and any draft head.

B = sequences, T = slots, H = drafter hidden size, A = query heads, K = key/value heads, D = head dimension.

It reads tokens and nothing of the target, so that a drafted token is one more token to it: every step of a draft is the
same pass as over known text. SGLang's STANDALONE shows it a text without its first token, as it does EAGLE's drafters:
slot t holds x_{t+1} and predicts x_{t+2}. State-dict names are those of Hugging Face's Llama.
"""

import torch
from torch import Tensor, nn

from sglang_ext.drafters import base
from sglang_ext.drafters.independent.config import IndependentConfig
from sglang_ext.drafters.layers import Attention, RMSNorm, SwiGLU
from sglang_ext.heads import DraftHead
from sglang_ext.trees import CandidateTree


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


class IndependentDrafter(base.Drafter):
    """The body (`model`) and its head (`lm_head`). A head that routes is given the embedding of each row's token for
    both of its inputs: it is all that is known before the layers have run."""

    config: IndependentConfig

    def __init__(self, config: IndependentConfig, head: DraftHead, draft_tree: CandidateTree | None = None) -> None:
        super().__init__(config, head, draft_tree)
        self.model = Body(config)

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_tokens(ids)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """What the head reads at every slot, [B, T, H]: of the tokens up to the slot's own."""
        x_BTH = self.embed(ids_BT)
        for layer in self.model.layers:
            x_BTH = layer(x_BTH)
        return self.model.norm(x_BTH)


Drafter = IndependentDrafter
