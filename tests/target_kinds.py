"""A tiny random target of each architecture that drafters are trained for.

V = 32 tokens, of which the tokenizer knows 24: vocabularies of published models are padded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

V, WORDS, LAYERS = 32, 24, 8  # as many layers as three default taps need
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden / heads
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT_OSS_ROPE = YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def _gemma3() -> PreTrainedConfig:
    """Scaled embeddings, norms of 1 + w, two rotary embeddings, windows, capped logits."""
    ropes = {"full_attention": LINEAR, "sliding_attention": PLAIN}
    return Gemma3TextConfig(
        **SHAPE, query_pre_attn_scalar=24, sliding_window=8, rope_parameters=ropes, final_logit_softcapping=2.0
    )


TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SHAPE, rope_parameters=YARN, sliding_window=None),
    "qwen2": lambda: Qwen2Config(  # without a head_dim of its own
        **{k: v for k, v in SHAPE.items() if k != "head_dim"}, rope_parameters=YARN, tie_word_embeddings=True
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, rope_parameters=PLAIN, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE, rope_parameters=LINEAR),
    # windows in every other layer, shorter than the prompts of the tests
    "gpt_oss": lambda: GptOssConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rope_parameters=GPT_OSS_ROPE
    ),
    "gemma3": _gemma3,
}


def save_target(folder: Path, name: str) -> Path:
    """Random weights that earlier tokens matter to without chaos, so that seconds of training teach a drafter a bit."""
    random_model(TARGETS[name]()).save_pretrained(folder)
    vocabulary = {f"t{v}": v for v in range(WORDS - 1)} | {"<|endoftext|>": WORDS - 1}
    words = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Its weights are those of `save_target`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.5)  # which transformers leaves at zero
            elif parameter_name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter).bfloat16())  # SGLang holds them in bfloat16
            elif "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "o_proj" in parameter_name or "down_proj" in parameter_name:
                parameter.mul_(0.1)
    return model
