"""Batched answers of a target on the CPU: left padding, a fixed-size KV cache, one temperature per sequence.

B = sequences, P = padded prompt length, N = answer tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache
from transformers.masking_utils import sdpa_mask

ATTENTION = "rayspec_grouped"


def grouped_attention(
    module: Any,
    query_BATD: Tensor,
    key_BKSD: Tensor,
    value_BKSD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention by two batched products per key/value head; returns [B, T, A, D].

    PyTorch's fused attention on the CPU spends most of a decode step (one query, many sequences) in bfloat16
    conversions: this is about twice as fast over the whole step.
    """
    B, A, T, D = query_BATD.shape
    K = key_BKSD.shape[1]
    grouped = query_BATD.reshape(B, K, A // K * T, D)
    scores = (grouped @ key_BKSD.transpose(-1, -2)).view(B, A, T, -1).float() * (scaling or D**-0.5)
    assert attention_mask is not None, "the cache is longer than the text, so there is always something to hide"
    # the smallest number and not -inf: a padding query sees no key, and its NaN would spread through the cache
    scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).to(query_BATD.dtype).view(B, K, A // K * T, -1)
    return (weights @ value_BKSD).view(B, A, T, D).transpose(1, 2), None


def grouped_mask(*args: Any, **options: Any) -> Tensor:
    """SDPA's mask (bool [B, 1, T, S], true where a key may be seen), never replaced by SDPA's `is_causal` flag."""
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})


AttentionInterface.register(ATTENTION, grouped_attention)
# without a mask function of the same name the model would build no mask at all, without a word
AttentionMaskInterface.register(ATTENTION, grouped_mask)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Switch the model's attention for the block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, P], mask int64 [B, P], 0 on the padding): last prompt tokens line up on the right."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def pick_tokens(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> Tensor:
    """Next token int64 [B]: the argmax where the temperature is 0, else drawn by inverting the distribution at u.

    One uniform number per sequence instead of one per vocabulary entry, so the draw costs less than the softmax.
    """
    tokens_B = logits_BV.argmax(dim=-1)
    drawn = temperature_B > 0
    if bool(drawn.any()):
        cumulative_DV = (logits_BV[drawn] / temperature_B[drawn, None]).softmax(dim=-1).cumsum(dim=-1)
        # the last entry of a float cumsum is not exactly 1: scale u by it, and stay inside the vocabulary
        u_D1 = uniform_B[drawn, None] * cumulative_DV[:, -1:]
        found_D = torch.searchsorted(cumulative_DV, u_D1, right=True).squeeze(1)
        tokens_B[drawn] = found_D.clamp_max(logits_BV.shape[1] - 1)
    return tokens_B


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    temperature_B: Tensor,
    max_new_tokens: int,
    eos_ids: Sequence[int],
    generator: torch.Generator,
) -> list[list[int]]:
    """The answer of each prompt, at most `max_new_tokens` long; a stop id ends it and is its last token."""
    ids_BP, mask_BP = pad_left(prompts, pad_id=eos_ids[0] if eos_ids else 0)
    B, width = ids_BP.shape
    cache = StaticCache(config=model.config, max_cache_len=width + max_new_tokens)
    # every cache slot has a mask entry from the start, so shapes stay fixed; the future is cut by causality
    mask = torch.cat([mask_BP, torch.ones(B, max_new_tokens, dtype=mask_BP.dtype)], dim=1)
    positions_BP = (mask_BP.cumsum(dim=1) - 1).clamp_min(0)
    stops = torch.tensor(list(eos_ids), dtype=torch.int64)

    ids, positions = ids_BP, positions_BP
    finished_B = torch.zeros(B, dtype=torch.bool)
    length_B = torch.zeros(B, dtype=torch.int64)
    answers_BN = torch.zeros(B, max_new_tokens, dtype=torch.int64)
    for n in range(max_new_tokens):
        with attention(model, ATTENTION):
            out = model(
                input_ids=ids,
                attention_mask=mask[:, : width + n],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        uniform_B = torch.rand(
            B, generator=generator
        )  # drawn for finished rows too: the stream does not depend on them
        tokens_B = pick_tokens(out.logits[:, -1].float(), temperature_B, uniform_B)
        answers_BN[:, n] = tokens_B
        length_B += (~finished_B).long()
        finished_B |= torch.isin(tokens_B, stops)
        if bool(finished_B.all()):
            break
        ids, positions = tokens_B[:, None], positions[:, -1:] + 1
    return [row[:length].tolist() for row, length in zip(answers_BN, length_B.tolist(), strict=True)]
