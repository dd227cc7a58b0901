"""Independent drafters, trained for seconds: enough to be accepted now and then."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from small_world import untrained
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import backward_batch
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.independent import IndependentDrafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import head_from_target, parse_head


def trained_drafter(
    target: FrozenTarget, answers: AnswerSet, options: Mapping[str, Any], *, steps: int, batch_size: int
) -> IndependentDrafter:
    """With a full head, by AdamW from a fixed order of the answers."""
    drafter = untrained(target, "independent", options, {"kind": "full"})
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = Batch.of(answers, torch.randperm(len(answers), generator=generator)[:batch_size])
        backward_batch(drafter, target, batch, num_steps=1, decay=1.0, chunk_rows=256)
        optimizer.step()
        optimizer.zero_grad()
    return drafter


def save_with_heads(
    folder: Path,
    drafter: IndependentDrafter,
    target: FrozenTarget,
    heads: Mapping[str, Mapping[str, Any]],
    artifacts: Mapping[str, Tensor],
) -> dict[str, Path]:
    """One body with heads made of its own full one, as a job makes them: routers are not trained."""
    full, made = drafter.lm_head, {}
    for name, spec in heads.items():
        drafter.lm_head = head_from_target(parse_head(spec), full.weight.detach(), artifacts)
        save_drafter(folder / name, drafter, target.info(tap_layers=()), {"recipe": "some seconds"})
        made[name] = folder / name
    drafter.lm_head = full
    return made


def as_hugging_face(drafter: IndependentDrafter) -> LlamaForCausalLM:
    """The same weights in a model that shares no code with ours. The head must be full."""
    fields = {name: value for name, value in drafter.config.to_json().items() if name != "dtype"}
    model = LlamaForCausalLM(LlamaConfig(**fields, bos_token_id=None, eos_token_id=None))
    model.load_state_dict(drafter.state_dict())
    return model
