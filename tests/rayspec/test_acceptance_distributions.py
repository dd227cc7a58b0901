"""What of the target's distribution a head has in reach, and how near its own comes to it there."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from answer_rows import random_rows

from rayspec.training.acceptance import Acceptance, measure
from rayspec.training.data.answers import AnswerSet
from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head

RECIPE = Recipe(num_steps=2, warmup_steps=1, ttt_steps=3, bfloat16=False)
MAPS = {"ids": torch.arange(0, 257, 2), "cluster_of": torch.arange(257) % 9}
KINDS = {
    "full": {"kind": "full"},
    "truncated": {"kind": "truncated", "size": 129},
    "dynaspec": {"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12},
}


def new(kind: str, spec: dict[str, Any], target: FrozenTarget, answers: AnswerSet) -> Drafter:
    return new_drafter(target, DrafterEntry(name=kind, draft_head=parse_head(spec)), RECIPE, answers, Origin(MAPS))


def measured(drafter: Drafter, target: FrozenTarget, answers: AnswerSet) -> Acceptance:
    return measure(drafter, target, answers, num_steps=3, batch_size=4, chunk_rows=7)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_mass_and_distance_on_the_support(kind: str, tiny_target: FrozenTarget) -> None:
    answers = random_rows()
    drafter = new(kind, KINDS[kind], tiny_target, answers)
    found = measured(drafter, tiny_target, answers)
    rows = roll_out(drafter, tiny_target, Batch.of(answers, torch.arange(len(answers))), 3)
    p_NV = tiny_target.distribution(rows.last_hidden_NG, torch.float32)
    for i in range(3):
        q_NV = drafter.lm_head.target_distribution(rows.hidden_KNH[i], i, rows.route(drafter.lm_head, i))
        on_NV = p_NV * (q_NV > 0)
        assert found.support[i] == pytest.approx(float((q_NV > 0).sum(dim=1).float().mean()))
        mass_N = on_NV.sum(dim=1)
        tv_N = 0.5 * (on_NV / mass_N[:, None] - q_NV).abs().sum(dim=1)
        assert found.mass[i] == pytest.approx(float(mass_N.mean()), rel=1e-4)
        assert found.tv_on_support[i] == pytest.approx(float(tv_N.mean()), rel=1e-3)
        assert (found.mass[i] < 0.999) == (kind != "full")
        # the bound of DynaSpec's analysis, of each row
        accepted_N = torch.minimum(p_NV, q_NV).sum(dim=1)
        assert bool((accepted_N >= mass_N - tv_N - 1e-5).all())


def test_drawn_answers_are_measured_where_they_are_named(tiny_target: FrozenTarget) -> None:
    """And those that are left out, which are greedy, have no part in it."""
    greedy, drawn = random_rows(), torch.tensor([1, 4, 5])
    drafter = new("truncated", KINDS["truncated"], tiny_target, greedy)
    answers = replace(greedy, temperature_N=torch.zeros(10).index_fill(0, drawn, 1.0))
    settings = {"num_steps": 3, "batch_size": 2, "chunk_rows": 7}
    found = measure(drafter, tiny_target, answers, sequences=drawn, **settings)
    fields = ("token_ids_NL", "loss_mask_NL", "prompt_length_N", "length_N", "temperature_N")
    alone = replace(greedy, **{name: getattr(greedy, name)[drawn] for name in fields})
    assert found == measure(drafter, tiny_target, alone, **settings)
    assert found != measure(drafter, tiny_target, answers, **settings)


@pytest.mark.parametrize("base", ["truncated", "dynaspec"])
def test_what_is_handed_on_is_in_reach_and_not_scored(base: str, tiny_target: FrozenTarget) -> None:
    """`support` of an rdk head is what its trials count (`shortlist_mean`): its base's."""
    answers = random_rows()
    alone = measured(new(base, KINDS[base], tiny_target, answers), tiny_target, answers)
    rdk = new("rdk", {"kind": "rdk", "base": KINDS[base]}, tiny_target, answers)
    found = measured(rdk, tiny_target, answers)
    assert found.support == alone.support
    assert all(mass > own for mass, own in zip(found.mass, alone.mass, strict=True))
