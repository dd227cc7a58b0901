"""EAGLE drafters, trained for seconds: enough to be accepted now and then."""

from typing import Any

import torch
from small_world import untrained

from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import backward_batch
from sglang_ext.drafters.training import Batch


def trained_eagle(
    target: FrozenTarget, answers: AnswerSet, *, steps: int, batch_size: int, ttt_steps: int = 2, lr: float = 3e-3
) -> Any:
    """On the target's own head, by AdamW from a fixed order of the answers."""
    drafter = untrained(target, "eagle", {}, {"kind": "full"})
    drafter.lm_head.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in drafter.parameters() if p.requires_grad), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = Batch.of(answers, torch.randperm(len(answers), generator=generator)[:batch_size])
        backward_batch(drafter, target, batch, num_steps=ttt_steps, decay=0.9, chunk_rows=256)
        optimizer.step()
        optimizer.zero_grad()
    return drafter
