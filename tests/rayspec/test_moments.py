"""What a head meets on the target's answers, and what a low-rank head's start makes of it."""

from pathlib import Path

import pytest
import torch
from answer_rows import random_rows

from rayspec.training import moments
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.moments import head_moments
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import roll_out
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head
from sglang_ext.heads.slimspec import low_rank

RECIPE = Recipe(num_steps=2, warmup_steps=1, ttt_steps=3, bfloat16=False)
FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))
ON_BASE = DrafterEntry(name="on_base", base="full", draft_head=parse_head({"kind": "specvocab", "rank": 4, "size": 20}))
FROM_SCRATCH = {
    "eagle3": DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 8})),
    "medusa": DrafterEntry(
        name="slim",
        draft_head=parse_head({"kind": "slimspec", "rank": 8}),
        drafter=parse_drafter({"kind": "medusa", "positions": 2, "shared_head": False}),
    ),
}


@pytest.fixture(scope="module")
def answers() -> AnswerSet:
    return random_rows()


def test_moments_are_over_all_answer_positions(
    tiny_target: FrozenTarget, answers: AnswerSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "CHUNK_ROWS", 7)
    states = []
    for row, mask_L in zip(answers.token_ids_NL.long(), answers.loss_mask_NL, strict=True):
        last_TH = tiny_target.last_hidden(row[None])[0]
        states += [last_TH[place - 1] for place in range(len(row)) if mask_L[place]]
    states_NH = torch.stack(states)
    found = head_moments(tiny_target, answers)
    torch.testing.assert_close(found["hidden_moment"], states_NH.T @ states_NH / len(states_NH))
    distributions_NV = (states_NH @ tiny_target.head_VG.T).softmax(dim=-1)
    torch.testing.assert_close(found["token_share"], distributions_NV.mean(dim=0))


@pytest.mark.parametrize("family", FROM_SCRATCH)
def test_a_low_rank_head_from_scratch_starts_from_the_targets_states(
    family: str, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    drafter = new_drafter(tiny_target, FROM_SCRATCH[family], RECIPE, answers)
    down_rH, up_Vr = low_rank(tiny_target.head_VG, 8, head_moments(tiny_target, answers))
    head = drafter.lm_head.at(0)
    torch.testing.assert_close(head.up @ head.down, up_Vr @ down_rH)


def test_a_router_on_a_base_starts_from_the_bases_states(
    tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    save_drafter(tmp_path / "full", new_drafter(tiny_target, FULL, RECIPE, answers), tiny_target.info(), {})
    base, _ = load_drafter(tmp_path / "full")  # as stored
    drafter = new_drafter(tiny_target, ON_BASE, RECIPE, answers, Origin(base=tmp_path / "full"))
    rows = roll_out(base, tiny_target, Batch.of(answers, torch.arange(len(answers))), RECIPE.ttt_steps)
    states_NH = rows.hidden_KNH.detach().flatten(0, 1)
    found = head_moments(tiny_target, answers, base, RECIPE.ttt_steps)
    torch.testing.assert_close(found["hidden_moment"], states_NH.T @ states_NH / len(states_NH))
    down_rH, up_Vr = low_rank(base.lm_head.get_parameter("weight"), 4, found)
    torch.testing.assert_close(drafter.lm_head.up @ drafter.lm_head.down, up_Vr @ down_rH)
