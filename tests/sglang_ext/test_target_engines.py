"""A drafter of every architecture in an engine: outputs are the target's own, and what SGLang's draft loop drafts is
what the training module says, so that rotary embeddings, taps and embeddings are the same on both sides.

T = tokens of a text, K = draft steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Ids, generate, output_ids, running_engine
from last_hidden_cases import as_answers, save, train
from small_world import untrained
from target_kinds import LAYERS, TARGETS, WORDS, save_target
from torch import Tensor

from rayspec.training.acceptance import verify_steps
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.ttt import backward_batch
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.eagle import EagleDrafter
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.shared.features import FeatureDrafter
from sglang_ext.drafters.shared.features.training import unroll
from sglang_ext.drafters.specformer import SpecFormerDrafter
from sglang_ext.drafters.training import Batch

K, NEW_TOKENS, TRAIN_STEPS = 3, 96, 30  # texts grow far beyond the 64 positions that the scaled kinds were "made for"
PROMPTS: list[Ids] = [
    torch.randint(WORDS, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 3, 5, 8, 13, 21, 34, 55)
]


@dataclass(frozen=True)
class Case:
    target: FrozenTarget
    drafter: Any  # that of EAGLE, EAGLE-3 or SpecFormer
    folder: Path  # of the drafter
    answers: list[Ids]  # Hugging Face's, greedy, some tokens longer than asked for

    def drafted(self, drafter: Drafter, taps: tuple[int, ...]) -> list[list[int]]:
        """How many verify steps of each prompt accept 0, 1, .. K tokens, by the training module."""
        return [
            count_accepted(drafter, self.target, torch.tensor([*prompt, *answer]), taps, len(prompt))
            for prompt, answer in zip(PROMPTS, self.answers, strict=True)
        ]


@torch.no_grad()
def drafts(drafter: Drafter, target: FrozenTarget, ids_T: Tensor, taps: tuple[int, ...]) -> Tensor:
    """What the training module drafts [K, T'] at each slot t: x_{t+2+i} at step i, given the tokens before it."""
    if isinstance(drafter, EagleDrafter):  # a tap in place of what it reads is a control
        features = target.features(ids_T[None], taps)[0] if taps else target.last_hidden(ids_T[None])
    else:
        features, _ = target.features(ids_T[None], taps)
    if isinstance(drafter, SpecFormerDrafter):
        states = drafter.begin(drafter.context(features)[0], K).unbind(1)
    else:
        assert isinstance(drafter, FeatureDrafter)
        states = [hidden[0] for hidden in unroll(drafter, target, ids_T[None], features, K).hiddens]
    head = drafter.lm_head
    return torch.stack([head.at(i).propose(state, i, 1).token_ids_Tk[:, 0] for i, state in enumerate(states)])


def count_accepted(
    drafter: Drafter, target: FrozenTarget, ids_T: Tensor, taps: tuple[int, ...], prompt_length: int
) -> list[int]:
    """Histogram over 0..K of one request's verify steps."""
    best_KT = drafts(drafter, target, ids_T, taps)
    counts, last = [0] * (K + 1), prompt_length  # the place of the last token that is known; the prefill made it
    while last - prompt_length + 1 < NEW_TOKENS:
        slot = last - 1  # it holds the feature of the token before the last, and drafts what comes after the last
        accepted = 0
        while accepted < K and best_KT[accepted, slot] == ids_T[last + 1 + accepted]:
            accepted += 1
        counts[accepted] += 1
        last += accepted + 1
    return counts


def make_case(folder: Path, name: str, kind: str = "eagle3") -> Case:
    target = FrozenTarget.load(save_target(folder / "target", name), torch.float32)
    answers = [greedy_answer(target.model, prompt) for prompt in PROMPTS]
    rows = as_answers(PROMPTS[3:], answers[3:])  # those with room for K steps before their first answer token
    torch.manual_seed(0)
    drafter = untrained(target, kind, {"positions": K} if kind == "specformer" else {}, {"kind": "full"})
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(TRAIN_STEPS):
        backward_batch(drafter, target, Batch.of(rows, torch.arange(5)), num_steps=K, decay=0.9, chunk_rows=256)
        optimizer.step()
        optimizer.zero_grad()
    save_drafter(
        folder / "drafter", drafter, target.info(tap_layers=drafter.config.tap_layers), {"recipe": "some seconds"}
    )
    return Case(target, load_drafter(folder / "drafter")[0], folder / "drafter", answers)


def greedy_answer(model: Any, prompt: Ids) -> Ids:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS + K + 1, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def with_rope(drafter: Any, rope: Rope) -> Drafter:
    """The same weights under another rotary embedding."""
    other = type(drafter)(replace(drafter.config, rope=rope), drafter.lm_head)
    other.load_state_dict(drafter.state_dict())
    return other


@pytest.mark.parametrize(
    "name", [name if name == "llama3" else pytest.param(name, marks=pytest.mark.slow) for name in TARGETS]
)
def test_drafts_of_the_engine_are_those_of_training(name: str, tmp_path: Path) -> None:
    check(make_case(tmp_path, name), other_taps=(3, 5, 6))


@pytest.mark.slow
def test_a_window_goes_by_the_depth_of_a_node(tmp_path: Path) -> None:
    """Rows of a tree are further from its root than their depth says: by them, windows of 8 tokens would end early."""
    case = make_case(tmp_path, "gpt_oss")
    tree: dict[str, Any] = {"draft_steps": K, "topk": 2, "num_draft_tokens": 6}
    with running_engine(case.folder, target=Path(case.target.folder), max_total_tokens=4096, **tree) as engine:
        answers = generate(engine, PROMPTS, NEW_TOKENS, ignore_eos=True)
    assert output_ids(answers) == [answer[:NEW_TOKENS] for answer in case.answers]
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_of_eagle_are_those_of_training(name: str, tmp_path: Path) -> None:
    """It reads the target's last hidden state behind its final norm, and not before."""
    check(make_case(tmp_path, name, "eagle"), other_taps=(LAYERS - 1,))


@pytest.mark.slow
def test_drafts_of_specformer_are_those_of_training(tmp_path: Path) -> None:
    check(make_case(tmp_path, "llama3", "specformer"), other_taps=(1, 5, 6, 8))


def check(case: Case, *, other_taps: tuple[int, ...]) -> None:
    taps, rope = case.drafter.config.tap_layers, case.drafter.config.rope
    expected = case.drafted(case.drafter, taps)
    with running_engine(case.folder, target=Path(case.target.folder), draft_steps=K, max_total_tokens=4096) as engine:
        answers = generate(engine, PROMPTS, NEW_TOKENS, ignore_eos=True)
    assert output_ids(answers) == [answer[:NEW_TOKENS] for answer in case.answers]
    found = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    assert [counts + [0] * (K + 1 - len(counts)) for counts in found] == expected
    # the counts would not be these if the engine had given the drafter anything else
    assert case.drafted(case.drafter, other_taps) != expected
    other = Rope() if rope != Rope() else Rope(rope_type="linear", factor=4.0)
    assert case.drafted(with_rope(case.drafter, other), taps) != expected


def hydra_and_its_steps(
    folder: Path, kind: str, options: dict[str, Any]
) -> tuple[FrozenTarget, Drafter, list[int], Callable[[Drafter, FrozenTarget], list[int]]]:
    """A trained Hydra drafter of a target of this kind, the verify steps of each prompt that its engine took, and what
    training says of them for any drafter and target. Its answers are the target's own."""
    target = FrozenTarget.load(save_target(folder / "target", kind), torch.float32)
    prompts = PROMPTS[3:]
    answers = [greedy_answer(target.model, prompt)[:NEW_TOKENS] for prompt in prompts]
    rows = as_answers(prompts, answers)
    torch.manual_seed(0)
    drafter = untrained(target, "hydra", {"positions": K, **options}, {"kind": "full"})
    train(drafter, target, rows, steps=TRAIN_STEPS, batch_size=5, lr=5e-3)
    drafter = load_drafter(save(folder / "drafter", drafter, target, None).absolute())[0]
    with running_engine(folder / "drafter", target=folder / "target", draft_steps=K, max_total_tokens=4096) as engine:
        found = generate(engine, prompts, NEW_TOKENS, ignore_eos=True)
    assert output_ids(found) == answers

    def expected(drafter: Drafter, target: FrozenTarget) -> list[int]:
        return verify_steps(drafter, target, rows, num_steps=K, batch_size=5, chunk_rows=256)

    return target, drafter, [answer["meta_info"]["spec_verify_ct"] for answer in found], expected


@pytest.mark.slow
def test_hydra_reads_the_embeddings_of_gemma_without_their_factor(tmp_path: Path) -> None:
    """As training gives them to it. Heads of the authors' form, which show a factor: ours bring rows to unit size."""
    target, drafter, steps, expected = hydra_and_its_steps(tmp_path, "gemma3", {"as_published": True})
    assert steps == expected(drafter, target)
    assert steps != expected(drafter, Scaled(target.folder, target.sha256, target.model, target.tokenizer))


@pytest.mark.slow
def test_drafts_of_a_prefix_layer_are_those_of_training(tmp_path: Path) -> None:
    """Over texts that grow beyond what the target's rotary embedding was made for, which is the layer's, too."""
    options = {"prefix_layer": True, "mlp_layers": 2}
    target, drafter, steps, expected = hydra_and_its_steps(tmp_path, "llama3", options)
    assert steps == expected(drafter, target)
    other = type(drafter)(replace(drafter.config, layer=replace(drafter.config.layer, rope=Rope())), drafter.lm_head)
    other.load_state_dict(drafter.state_dict())
    assert steps != expected(other, target)


class Scaled(FrozenTarget):
    """Gives drafters the embeddings that Gemma's own layers read."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(ids)
