"""A drafter's own tokens: what it proposes along the target's answers, at every position and draft step.

The answers are teacher-forced, as in training (rayspec.training.ttt). N = answer positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rayspec.calibration.counting import partial_counts
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.training import Batch

CHUNK_ROWS = 512  # whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """`temperature` 0 takes the likeliest token, above 0 draws one."""

    draft_steps: int
    temperature: float
    seed: int


@torch.no_grad()
def proposals(
    drafter: Drafter, target: FrozenTarget, batch: Batch, settings: DraftSettings, generator: torch.Generator
) -> Tensor:
    """Target ids int64 [draft_steps, N] proposed for each answer position of the batch."""
    found = []
    for _, rows in roll_out(drafter, target, batch, settings.draft_steps).chunks(CHUNK_ROWS):
        tokens_K = []
        for step, hidden_nH in enumerate(rows.hidden_KNH):
            head = drafter.lm_head.at(step)
            routed = rows.route(head, step)
            if settings.temperature == 0.0:
                tokens_K.append(head.propose(hidden_nH, step, 1, routed).token_ids_Tk.squeeze(1))
            else:
                logits_nV = head.target_logits(hidden_nH, step, routed) / settings.temperature
                tokens_K.append(torch.multinomial(logits_nV.softmax(dim=-1), 1, generator=generator).squeeze(1))
        found.append(torch.stack(tokens_K))
    return torch.cat(found, dim=1)


@lru_cache(maxsize=1)
def _models(target: str, drafter: str) -> tuple[FrozenTarget, Drafter]:
    """Once in each of Ray's worker processes, which outlive a task."""
    return FrozenTarget.load(target, torch.float32), load_drafter(drafter)[0]


def count_drafts(
    batch: dict[str, np.ndarray], target: str, drafter: str, settings: DraftSettings
) -> dict[str, np.ndarray]:
    """Partial counts of what the drafter (a folder) proposes along rows of an answer set (`answer_columns`)."""
    answers = answer_rows(batch)
    rows = Batch.of(answers, torch.arange(len(answers)))
    # by the rows' own numbers, so that who computes them does not change what is drawn
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + int(batch["row"][0]))
    frozen, model = _models(target, drafter)
    return partial_counts(proposals(model, frozen, rows, settings, generator).flatten().numpy())


def answer_columns(answers: AnswerSet) -> dict[str, Sequence]:
    """The columns that `answer_rows` reads back."""
    return {
        "row": list(range(len(answers))),
        "token_ids": answers.token_ids_NL.tolist(),
        "loss_mask": answers.loss_mask_NL.int().tolist(),
        "prompt_length": answers.prompt_length_N.tolist(),
        "length": answers.length_N.tolist(),
    }


def answer_rows(batch: dict[str, np.ndarray]) -> AnswerSet:
    return AnswerSet(
        name="batch",
        sha256="",
        token_ids_NL=torch.from_numpy(np.stack(list(batch["token_ids"])).astype(np.int32)),
        loss_mask_NL=torch.from_numpy(np.stack(list(batch["loss_mask"])).astype(bool)),
        prompt_length_N=torch.from_numpy(batch["prompt_length"].astype(np.int32)),
        length_N=torch.from_numpy(batch["length"].astype(np.int32)),
        temperature_N=torch.zeros(len(batch["length"])),
    )
