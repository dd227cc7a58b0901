"""A target so small that its distribution can be counted, and drafters of any head kind for it.

V = 16 tokens, B = sequences, T = positions, R = answers, J = answer tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for, unroll
from sglang_ext.heads import head_from_target, parse_head

V = 16
IDS = torch.tensor([9, 2, 12, 6, 0, 15, 5, 3, 11])  # most useful first
CLUSTERS = torch.tensor([1, 2, 0, 3, 4, 2, 1, 4, 5, 3, 5, 1, 2, 4, 3, 0])  # the pinned one has two tokens, most three
TRUNCATED = {"kind": "truncated", "size": len(IDS)}
DYNASPEC = {"kind": "dynaspec", "clusters": 5, "first": 3, "later": 2, "rule": "fixed", "router_width": 8}
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "slimspec": {"kind": "slimspec", "rank": 6},
    "truncated": TRUNCATED,
    "truncated_by_step": {**TRUNCATED, "step_sizes": [9, 6, 4]},
    "specvocab": {"kind": "specvocab", "rank": 4, "size": 6},
    "dynaspec": DYNASPEC,
    "dynaspec_union": {**DYNASPEC, "union": True},
    "dynaspec_request": {**DYNASPEC, "union": "request"},
    "coral": {"kind": "coral", "clusters": 5, "top": 2},
    "rdk": {"kind": "rdk", "base": TRUNCATED, "neighbours": 3, "self_weight": 0.6},
}
PROMPTS = ((3, 1, 4), (1, 5, 9, 2, 6), (2, 7, 1, 8, 2, 8, 1), (14,))
DRAFT_STEPS = 3


class ShallowTarget(FrozenTarget):
    """Of four layers, which cost half of the eight for which EAGLE-3 has taps of its own."""

    @cached_property
    def taps(self) -> tuple[int, ...]:
        return (1, 2, 3)


@dataclass(frozen=True)
class Toy:
    target: FrozenTarget
    drafter: Eagle3Drafter  # with a full head, trained for some seconds: right about a quarter of the time

    @property
    def folder(self) -> Path:
        return Path(self.target.folder)

    def save_drafter(self, folder: Path, head: str) -> Path:
        """A drafter with one of HEADS, made from the trained full one as a job makes it: routers are not trained."""
        artifacts = {"ids": IDS, "cluster_of": CLUSTERS}
        drafter = Eagle3Drafter(
            self.drafter.config,
            head_from_target(parse_head(HEADS[head]), self.drafter.lm_head.weight.detach(), artifacts),
        )
        body = {name: t for name, t in self.drafter.state_dict().items() if not name.startswith("lm_head.")}
        drafter.load_state_dict(body, strict=False)
        save_drafter(folder, drafter, self.target.info(), {"recipe": "toy"})
        return folder

    @torch.no_grad()
    def logits(self, prompt: tuple[int, ...], answers_RJ: np.ndarray) -> np.ndarray:
        """Hugging Face's float32 logits [R, J, V] that answer token j was drawn from, after the prompt and the tokens
        before it: no code shared with SGLang or with ours."""
        unique_UJ, row_R = np.unique(answers_RJ[:, :-1], axis=0, return_inverse=True)
        context = torch.cat([torch.tensor(prompt).expand(len(unique_UJ), -1), torch.tensor(unique_UJ)], dim=1)
        parts = [self.target.model(input_ids=part, use_cache=False).logits for part in context.split(2048)]
        return torch.cat(parts)[:, len(prompt) - 1 :].double().numpy()[row_R.ravel()]


def make_toy(folder: Path) -> Toy:
    """A random target of 4 layers of 64, and its drafter."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
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
    with torch.no_grad():
        model.lm_head.weight *= 0.7  # an entropy of about 2 of 2.8 nats: neither flat nor sharp
        for (
            layer
        ) in model.model.layers:  # earlier tokens move the distribution by a third of its mass: no chaos, no chain
            layer.self_attn.o_proj.weight *= 0.03
            layer.mlp.down_proj.weight *= 0.03
    return toy_of(model, folder, ShallowTarget)


def toy_of(model: PreTrainedModel, folder: Path, kind: type[FrozenTarget] = FrozenTarget) -> Toy:
    """A target of any architecture with V tokens, saved to `folder`, and its drafter."""
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"t{v}": v for v in range(V)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    target = kind.load(folder, torch.float32)
    return Toy(target, _trained_drafter(target))


def _trained_drafter(target: FrozenTarget) -> Eagle3Drafter:
    drafter = Eagle3Drafter(
        config_for(target, Eagle3Options()), head_from_target(parse_head({"kind": "full"}), target.head_VG)
    )
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(80):
        ids_BT = torch.randint(V, (64, 16))
        taps, last_hidden = target.features(ids_BT)
        p_BTV = target.distribution(last_hidden, torch.float32)
        loss = torch.zeros(())
        for step, hidden in enumerate(unroll(drafter, target, ids_BT, taps, DRAFT_STEPS).hiddens):
            rows = hidden[:, : hidden.shape[1] - step].flatten(0, 1)  # slot t of step i predicts x_{t+2+i}
            loss = loss + drafter.lm_head.loss(rows, step, None, p_BTV[:, 1 + step :].flatten(0, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


def filtered(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = V,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logit_bias: Mapping[str, float] | None = None,
) -> np.ndarray:
    """The distribution of plain decoding, [..., V]: every filter looks at the same tempered distribution."""
    biased = logits + np.array([(logit_bias or {}).get(str(v), 0.0) for v in range(V)])
    p = np.exp((biased - biased.max(axis=-1, keepdims=True)) / temperature)
    p /= p.sum(axis=-1, keepdims=True)
    order = np.argsort(-p, axis=-1)
    best_first = np.take_along_axis(p, order, axis=-1)
    keep = np.arange(V) < top_k
    keep = keep & (best_first.cumsum(axis=-1) - best_first <= top_p) & (best_first >= min_p * best_first[..., :1])
    distribution = np.zeros_like(p)
    np.put_along_axis(distribution, order, np.where(keep, best_first, 0.0), axis=-1)
    return distribution / distribution.sum(axis=-1, keepdims=True)
