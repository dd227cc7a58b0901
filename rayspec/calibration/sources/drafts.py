"""A drafter's own tokens: what it proposes along the target's answers, at every position and draft step, or the text
that it writes by itself after their prompts.

Along answers it is teacher-forced, as in training (rayspec.training.ttt). B = sequences, N = answer positions, H =
hidden size that the head reads.
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
from sglang_ext.drafters import family
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import DraftHead

CHUNK_ROWS = 512  # whose logits are held at once


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """`steps`: draft steps at each position of an answer, or tokens of a text; `temperature` 0 takes the likeliest
    token, above 0 draws one."""

    steps: int
    temperature: float
    seed: int

    def choose(
        self, head: DraftHead, hidden_BH: Tensor, step: int, routed: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Target ids int64 [B]."""
        if self.temperature == 0.0:
            return head.propose(hidden_BH, step, 1, routed).token_ids_Tk.squeeze(1)
        logits_BV = head.target_logits(hidden_BH, step, routed) / self.temperature
        return torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator).squeeze(1)


@torch.no_grad()
def proposals(
    drafter: Drafter, target: FrozenTarget, answers: AnswerSet, settings: DraftSettings, generator: torch.Generator
) -> Tensor:
    """Target ids int64 [steps, N] that are proposed at the answers' positions."""
    batch, found = Batch.of(answers, torch.arange(len(answers))), []
    for _, rows in roll_out(drafter, target, batch, settings.steps).chunks(CHUNK_ROWS):
        tokens_K = []
        for step, hidden_nH in enumerate(rows.hidden_KNH):
            head = drafter.lm_head.at(step)
            tokens_K.append(settings.choose(head, hidden_nH, step, rows.route(head, step), generator))
        found.append(torch.stack(tokens_K))
    return torch.cat(found, dim=1)


@torch.no_grad()
def texts(
    drafter: Drafter,
    target: FrozenTarget,
    answers: AnswerSet,
    settings: DraftSettings,
    generator: torch.Generator,
    stop_ids: tuple[int, ...],
) -> Tensor:
    """Target ids int64 that are written after the prompts of the answers; a stop token is a text's last."""

    head = drafter.lm_head.at(0)  # as at the first draft step: later ones may have fewer tokens to choose from

    def choose(hidden_BH: Tensor, embed_BH: Tensor, feature_BH: Tensor) -> Tensor:
        routed = head.route(embed_BH, feature_BH, 0) if head.routes else None
        return settings.choose(head, hidden_BH, 0, routed, generator)

    length_B = answers.prompt_length_N.long()
    prompt_BT = answers.token_ids_NL[:, : int(length_B.max())].long()
    written_BK = family(drafter.kind).training.write(drafter, target, prompt_BT, length_B, settings.steps, choose)
    is_stop_BK = torch.isin(written_BK, torch.tensor(stop_ids)).long()
    return written_BK[is_stop_BK.cumsum(1) - is_stop_BK == 0]  # no stop token came before


@lru_cache(maxsize=1)
def _models(target: str, drafter: str) -> tuple[FrozenTarget, Drafter]:
    """Once in each of Ray's worker processes, which outlive a task."""
    return FrozenTarget.load(target, torch.float32), load_drafter(drafter)[0]


def count_drafts(
    batch: dict[str, np.ndarray],
    target: str,
    drafter: str,
    settings: DraftSettings,
    stop_ids: tuple[int, ...] | None = None,
) -> dict[str, np.ndarray]:
    """Partial counts of what the drafter (a folder) proposes along rows of an answer set (`answer_columns`), or, with
    `stop_ids`, of what it writes after their prompts."""
    answers = answer_rows(batch)
    # by the rows' own numbers, so that who computes them does not change what is drawn
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + int(batch["row"][0]))
    frozen, model = _models(target, drafter)
    if stop_ids is None:
        ids = proposals(model, frozen, answers, settings, generator)
    else:
        ids = texts(model, frozen, answers, settings, generator, stop_ids)
    return partial_counts(ids.flatten().numpy())


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
