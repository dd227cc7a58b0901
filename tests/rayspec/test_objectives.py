"""What a recipe trains for reaches the head, and goes without saying where it is the default."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from answer_rows import random_rows
from torch.nn import functional as F

from rayspec.training.drafter import Update, train_step
from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import CHOICES, Recipe
from rayspec.training.ttt import roll_out
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head
from sglang_ext.heads.losses import Objective

RECIPE = Recipe(num_steps=6, warmup_steps=2, ttt_steps=3, bfloat16=False, chunk_rows=16)
IDS = torch.arange(0, 257, 2)
REDUCED = DrafterEntry(name="reduced", draft_head=parse_head({"kind": "truncated", "size": 129}))


def first_step(target: FrozenTarget, recipe: Recipe) -> tuple[Update, torch.Tensor]:
    """(the first step, losses of all its rows [K, N] by the objective alone)."""
    answers = random_rows()
    drafter = new_drafter(target, REDUCED, recipe, answers, Origin({"ids": IDS}))
    batch = Batch.of(answers, torch.tensor([0, 4, 7]))
    rows = roll_out(drafter, target, batch, recipe.ttt_steps)
    p_NV = target.distribution(rows.last_hidden_NG, torch.float32)
    if recipe.labels == "hard":
        p_NV = F.one_hot(batch.ids_BT[batch.sequence_N, batch.position_N + 1], 257).float()
    with torch.no_grad():
        expected = [drafter.lm_head.loss(h, i, None, p_NV, recipe.objective) for i, h in enumerate(rows.hidden_KNH)]
    update = train_step(drafter, target, [batch], recipe, recipe.make_optimizers(drafter), 0)
    return update, torch.stack(expected)


CHANGES: list[dict[str, Any]] = [
    {},
    {"divergence": "tv"},
    {"labels": "hard"},
    {"cut_rows": "keep"},
    {"top_k_weight": 1.0, "top_k": 3},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_recipes_choice_is_what_is_trained(tiny_target: FrozenTarget, changes: dict[str, Any]) -> None:
    update, expected_KN = first_step(tiny_target, replace(RECIPE, **changes))
    torch.testing.assert_close(update.loss_K, expected_KN.mean(dim=1), rtol=1e-4, atol=1e-5)
    default, _ = first_step(tiny_target, RECIPE)
    assert torch.allclose(update.loss_K, default.loss_K) == (not changes)


def test_the_recipes_reduction_is_what_is_trained(tiny_target: FrozenTarget) -> None:
    """It is not in the losses that are logged, and the optimizers hide a factor: so by the gradient's own norm."""
    recipes = (replace(RECIPE, ttt_decay=0.8, ttt_reduction=r) for r in ("sum", "mean"))
    of_sum, of_mean = (first_step(tiny_target, recipe)[0].figures["grad_norm"] for recipe in recipes)
    assert of_sum / of_mean == pytest.approx(1 + 0.8 + 0.64, rel=1e-4)


def test_an_objective_that_is_the_default_is_not_named() -> None:
    """So that drafters from before there was a choice are recognised."""
    assert not {*CHOICES, "top_k_weight", "top_k"} & set(RECIPE.to_dict())
    other = Recipe(divergence="lk", labels="hard", cut_rows="keep", ttt_reduction="mean")
    assert {name: other.to_dict()[name] for name in CHOICES} == {
        "divergence": "lk",
        "labels": "hard",
        "cut_rows": "keep",
        "ttt_reduction": "mean",
    }
    assert other.objective == Objective(divergence="lk", keeps_cut_rows=True)


@pytest.mark.parametrize("field", CHOICES)
def test_an_unknown_choice_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe\.{field} must be one of {CHOICES[field][0]}, .* got 'other'"):
        Recipe(**{field: "other"})


def test_tokens_of_a_loss_that_is_off_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe\.top_k=5 .* recipe\.top_k_weight is 0; set top_k_weight"):
        Recipe(top_k=5)


def test_a_further_loss_on_the_likeliest_needs_the_targets_distribution() -> None:
    with pytest.raises(ValueError, match=r"recipe\.top_k_weight=1\.0 weighs tokens .* set labels=soft"):
        Recipe(top_k_weight=1.0, labels="hard")
