"""The text that a drafter writes by itself, against what its rollout over that very text says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_world import untrained
from torch import Tensor

from rayspec.calibration.sources.drafts import DraftSettings, texts
from rayspec.calibration.sources.kinds import DraftText
from rayspec.training.data.answers import AnswerSet
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters import family
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import head_from_target, parse_head

LENGTHS = (3, 9, 2, 6)
STEPS = 7
# Rounding grows with every step that reads the one before, on some processors to 2e-3 of a state; that of another row
# differs in its first digit.
ROUNDING = {"rtol": 1e-2, "atol": 1e-2}
KINDS: dict[str, dict[str, Any]] = {"eagle3": {}, "eagle": {}, "independent": {"hidden_size": 16, "num_layers": 2}}
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "routed": {"kind": "dynaspec", "clusters": 8, "first": 3, "later": 2, "router_width": 8},
}


def prompts(length: int = max(LENGTHS), seed: int = 0) -> Tensor:
    return torch.randint(1, 257, (len(LENGTHS), length), generator=torch.Generator().manual_seed(seed))


def shaken(target: FrozenTarget, kind: str, head: str) -> Any:
    """A drafter whose layers all matter."""
    artifacts = {"cluster_of": torch.arange(257) % 8 + 1} if head == "routed" else None
    drafter = untrained(target, kind, KINDS[kind], HEADS[head], artifacts)
    generator = torch.Generator().manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return drafter.requires_grad_(False)


def answered(ids_NL: Tensor, prompt_length_N: Tensor, length_N: Tensor) -> AnswerSet:
    place_L = torch.arange(ids_NL.shape[1])
    is_answer_NL = (place_L >= prompt_length_N[:, None]) & (place_L < length_N[:, None])
    return AnswerSet(
        name="prompts",
        sha256="",
        token_ids_NL=ids_NL.int(),
        loss_mask_NL=is_answer_NL,
        prompt_length_N=prompt_length_N.int(),
        length_N=length_N.int(),
        temperature_N=torch.zeros(len(ids_NL)),
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_token_is_what_the_rollout_says_after_those_before_it(
    tiny_target: FrozenTarget, kind: str, head: str
) -> None:
    """One sequence at a time and along the finished text, where training's rollout is at its own slot: step i of a
    row reads i tokens of the draft, whose row begins at the prompt's end."""
    drafter, own = shaken(tiny_target, kind, head), family(kind).training
    read: list[tuple[Tensor, Tensor, Tensor]] = []  # hidden, and the two that route

    def choose(hidden_BH: Tensor, embed_BH: Tensor, feature_BH: Tensor) -> Tensor:
        at = drafter.lm_head.at(0)
        routed = at.route(embed_BH, feature_BH, 0) if at.routes else None
        read.append((hidden_BH, embed_BH, feature_BH))
        return at.propose(hidden_BH, 0, 1, routed).token_ids_Tk.squeeze(1)

    length_B = torch.tensor(LENGTHS)
    with torch.no_grad():
        written_BK = own.write(drafter, tiny_target, prompts(), length_B, STEPS, choose)
    assert written_BK.shape == (len(LENGTHS), STEPS)
    assert len(set(written_BK.flatten().tolist())) > STEPS, "a drafter that says one thing shows nothing"
    for b, length in enumerate(LENGTHS):
        text = torch.cat([prompts()[b, :length], written_BK[b]])
        for step in range(STEPS):
            # the row that predicts written[step] from `step` drafts
            batch = Batch(text[None], torch.tensor([0]), torch.tensor([length - 1 + step]))
            rows = own.roll_out(drafter, tiny_target, batch, step + 1)
            hidden_BH, embed_BH, feature_BH = read[step]
            torch.testing.assert_close(hidden_BH[b], rows.hidden_KNH[step, 0], **ROUNDING)
            torch.testing.assert_close(embed_BH[b], rows.embed_KNH[step, 0])
            if rows.feature_KNH is not None:
                torch.testing.assert_close(feature_BH[b], rows.feature_KNH[step, 0], **ROUNDING)


def test_a_text_of_its_own_is_not_what_it_proposes_along_another(tiny_target: FrozenTarget) -> None:
    drafter = shaken(tiny_target, "eagle3", "full")
    length_N = torch.tensor([9] * 4)
    settings = DraftSettings(steps=STEPS, temperature=0.0, seed=0)
    both = []
    for seed in (1, 2):  # of what stands after the prompts
        ids_NL = torch.cat([prompts(), prompts(STEPS, seed)], dim=1)
        answers = answered(ids_NL, length_N, length_N + STEPS)
        both.append(texts(drafter, tiny_target, answers, settings, torch.Generator(), stop_ids=()))
    assert both[0].tolist() == both[1].tolist(), "it reads nothing of the answers"
    assert both[0].numel() == 4 * STEPS


def test_a_stop_token_ends_a_text_and_is_counted(tiny_target: FrozenTarget) -> None:
    drafter = shaken(tiny_target, "eagle3", "full")
    length_N = torch.tensor(LENGTHS)
    answers = answered(prompts(), length_N, length_N)
    settings = DraftSettings(steps=STEPS, temperature=0.0, seed=0)
    whole_NK = texts(drafter, tiny_target, answers, settings, torch.Generator(), stop_ids=()).view(-1, STEPS)
    stop = int(whole_NK[0, 2])
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in whole_NK.tolist()]
    cut = texts(drafter, tiny_target, answers, settings, torch.Generator(), stop_ids=(stop,))
    assert cut.tolist() == [token for row in expected for token in row]
    assert len(cut) < whole_NK.numel()


def test_what_is_drawn_follows_the_head_s_law(tiny_target: FrozenTarget) -> None:
    """The first token after one prompt, many times, by its total variation from the law; greedy choice as the control
    that is far from it."""
    drafter, draws = shaken(tiny_target, "eagle3", "full"), 4000
    drafter.lm_head.weight *= 0.05  # a law that is spread out
    ids_NL = prompts()[1:2].expand(draws, -1)
    length_N = torch.full((draws,), 9)
    answers = answered(ids_NL, length_N, length_N)
    batch = Batch(torch.cat([ids_NL[:1], ids_NL[:1]], dim=1), torch.tensor([0]), torch.tensor([8]))
    with torch.no_grad():
        hidden_H = family("eagle3").training.roll_out(drafter, tiny_target, batch, 1).hidden_KNH[0, 0]
    law_V = drafter.lm_head.target_logits(hidden_H[None], 0, None)[0].softmax(dim=-1)
    away = {}
    for temperature in (1.0, 0.0):
        settings = DraftSettings(steps=1, temperature=temperature, seed=0)
        drawn = texts(drafter, tiny_target, answers, settings, torch.Generator().manual_seed(0), stop_ids=())
        share_V = torch.bincount(drawn, minlength=len(law_V)) / draws
        away[temperature] = float((share_V - law_V).abs().sum() / 2)
    expected = float((law_V * (1 - law_V) / (2 * torch.pi * draws)).sqrt().sum())  # mean of sum |share - p| / 2
    assert away[1.0] < 1.3 * expected
    assert away[0.0] > 0.5


def test_a_family_that_cannot_go_on_and_a_text_that_is_too_long_are_refused(tiny_target: FrozenTarget) -> None:
    length_N = torch.tensor(LENGTHS)
    answers = answered(prompts(), length_N, length_N)
    medusa = untrained(tiny_target, "medusa", {"positions": 2}, {"kind": "full"})
    with pytest.raises(ValueError, match=r"sources\.\*\.drafter=full is of kind medusa, which cannot go on from"):
        DraftText().check(answers, medusa.config)
    eagle = untrained(tiny_target, "eagle3", {}, {"kind": "full"})
    most = eagle.config.max_position_embeddings
    DraftText(tokens=most - 9).check(answers, eagle.config)
    with pytest.raises(ValueError, match=rf"sources\.\*\.tokens={most - 8} after a prompt of 9 tokens .* {most - 9}$"):
        DraftText(tokens=most - 8).check(answers, eagle.config)
    long_N = torch.tensor([9, most, 9, 9])
    with pytest.raises(ValueError, match=r"or another drafter$"):
        DraftText(tokens=1).check(answered(prompts(most), long_N, long_N), eagle.config)
    short_N = torch.tensor([9, 1, 9, 9])
    with pytest.raises(ValueError, match="prompts has a prompt of one token"):
        DraftText(tokens=1).check(answered(prompts(), short_N, short_N), eagle.config)


def test_a_head_that_shrinks_by_step_writes_as_at_its_first(tiny_target: FrozenTarget) -> None:
    drafter = shaken(tiny_target, "eagle3", "full")
    ids = torch.arange(64)
    shrinking = parse_head({"kind": "truncated", "size": 64, "step_sizes": [64, 1]})
    drafter.lm_head = head_from_target(shrinking, drafter.lm_head.weight.detach(), {"ids": ids})
    length_N = torch.tensor(LENGTHS)
    settings = DraftSettings(steps=STEPS, temperature=1.0, seed=0)
    answers, generator = answered(prompts(), length_N, length_N), torch.Generator().manual_seed(0)
    written_NK = texts(drafter, tiny_target, answers, settings, generator, stop_ids=()).view(-1, STEPS)
    assert len(set(written_NK[:, 1:].flatten().tolist())) > 6
