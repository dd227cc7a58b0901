"""A target so small that its law can be counted, and drafters of any head kind for it.

V = 16 tokens, 8 layers of 64: random weights, large enough that every token of the context matters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.heads import head_from_target

V = 16
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8, 1), (14,))


def save_toy_target(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 0.7  # an entropy of about 1.8 of 2.8 nats: neither flat nor sharp
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{v}": v for v in range(V)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    return folder


def save_toy_drafter(
    folder: Path, target_folder: Path, head: Mapping[str, Any], artifacts: Mapping[str, Tensor] | None = None
) -> Path:
    """A drafter with random weights and a head made from the target's (`artifacts`: what its kind needs)."""
    target = FrozenTarget.load(target_folder, torch.float32)
    drafter = Eagle3Drafter(target.drafter_config(), head_from_target(head, target.head_VG, artifacts))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in drafter.named_parameters():
        if not name.startswith("lm_head.") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.25, generator=generator)
    save_drafter(folder, drafter, target.info(), {"recipe": "random"})
    return folder


class ToyLaw:
    """The target's next-token laws by Hugging Face in float32: no code shared with SGLang or with ours."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prompt: tuple[int, ...], answers_RJ: np.ndarray) -> np.ndarray:
        """Logits [R, J, V] that answer token j was drawn from, after the prompt and the tokens before it."""
        unique_UJ, row_R = np.unique(answers_RJ[:, :-1], axis=0, return_inverse=True)
        ids = torch.tensor(unique_UJ)
        context = torch.cat([torch.tensor(prompt).expand(len(ids), -1), ids], dim=1)
        parts = [self.model(input_ids=part, use_cache=False).logits for part in context.split(2048)]
        return torch.cat(parts)[:, len(prompt) - 1 :].double().numpy()[row_R.ravel()]


def filtered(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = V,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logit_bias: Mapping[str, float] | None = None,
) -> np.ndarray:
    """The law of plain decoding, [..., V]: every filter looks at the same tempered law."""
    biased = logits + np.array([(logit_bias or {}).get(str(v), 0.0) for v in range(V)])
    p = np.exp((biased - biased.max(axis=-1, keepdims=True)) / temperature)
    p /= p.sum(axis=-1, keepdims=True)
    order = np.argsort(-p, axis=-1)
    best_first = np.take_along_axis(p, order, axis=-1)
    keep = np.arange(V) < top_k
    keep = keep & (best_first.cumsum(axis=-1) - best_first <= top_p) & (best_first >= min_p * best_first[..., :1])
    law = np.zeros_like(p)
    np.put_along_axis(law, order, np.where(keep, best_first, 0.0), axis=-1)
    return law / law.sum(axis=-1, keepdims=True)
