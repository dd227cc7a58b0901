import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rayspec.training.generation import generate, pick_tokens

from rayspec.training import answers as answers_module
from rayspec.training.answers import AnswersConfig, make_answers, read_answers
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.prompts import cut_prompt_ids
from rayspec.training.sources import CorpusConfig

CONFIG = AnswersConfig(
    count=10, min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=12, batch_size=4, greedy_share=0.5, seed=3
)


def prompts(count: int = 10) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 257, (8 + n,), generator=generator).tolist() for n in range(count)]


def greedy_reference(target: FrozenTarget, prompt: Sequence[int], count: int) -> list[int]:
    """One sequence, no cache, no padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("lengths", [(8, 9, 10, 11, 12), (9, 9, 9, 9, 9)], ids=["ragged", "no_padding"])
def test_greedy_batch_equals_one_by_one(tiny_target: FrozenTarget, lengths: tuple[int, ...]) -> None:
    batch = [prompt[:length] for prompt, length in zip(prompts(20)[12:], lengths, strict=False)]
    assert tuple(map(len, batch)) == lengths
    got = generate(
        tiny_target.model,
        batch,
        temperature_B=torch.zeros(5),
        max_new_tokens=10,
        eos_ids=[],
        generator=torch.Generator(),
    )
    assert got == [greedy_reference(tiny_target, prompt, 10) for prompt in batch]


def test_answer_ends_with_its_stop_token(tiny_target: FrozenTarget) -> None:
    batch = prompts(3)
    reference = [greedy_reference(tiny_target, prompt, 10) for prompt in batch]
    stop = reference[0][3]
    got = generate(
        tiny_target.model,
        batch,
        temperature_B=torch.zeros(3),
        max_new_tokens=10,
        eos_ids=[stop],
        generator=torch.Generator(),
    )
    assert got == [r[: r.index(stop) + 1] if stop in r else r for r in reference]


def test_drawn_tokens_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    draws = 40_000
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0))
    tokens = pick_tokens(logits.expand(draws, -1), torch.full((draws,), 0.8), uniform)
    frequency = torch.bincount(tokens, minlength=4) / draws
    # four standard errors of a share are below 4 * 0.5 / sqrt(40000) = 0.01
    torch.testing.assert_close(frequency, (logits / 0.8).softmax(0), rtol=0, atol=0.01)


def test_zero_temperature_rows_are_greedy_beside_drawn_ones() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.5]])
    # u just below 1 takes the last entry, so the drawn row differs from the greedy one
    tokens = pick_tokens(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.999999, 0.999999]))
    assert tokens.tolist() == [1, 2]


def test_stored_answers_are_what_was_generated(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    make_answers(tmp_path / "a", tiny_target, CONFIG, prompts())
    stored = read_answers(tmp_path / "a")
    assert len(stored) == 10
    for n, prompt in enumerate(prompts()):
        row, length = stored.token_ids_NL[n], int(stored.length_N[n])
        assert row[: len(prompt)].tolist() == prompt
        assert stored.loss_mask_NL[n].nonzero().squeeze(1).tolist() == list(range(len(prompt), length))
        if CONFIG.is_greedy(n):
            expected = greedy_reference(tiny_target, prompt, 12)
            expected = expected[: expected.index(0) + 1] if 0 in expected else expected
            assert row[len(prompt) : length].tolist() == expected
    assert (stored.temperature_N == 0).sum() == 5
    index = json.loads((tmp_path / "a" / "answers.json").read_text())
    assert index["target_sha256"] == tiny_target.sha256
    assert index["totals"]["answer_tokens"] == stored.num_answer_tokens


def test_resumed_answers_equal_uninterrupted_ones(
    tiny_target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_answers(tmp_path / "whole" / "answers", tiny_target, CONFIG, prompts())
    calls = 0

    def interrupted(*args: object, **kwargs: object) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(answers_module, "generate", interrupted)
    folder = tmp_path / "cut" / "answers"
    with pytest.raises(KeyboardInterrupt):
        make_answers(folder, tiny_target, CONFIG, prompts())
    assert len(list(folder.glob("*.safetensors"))) == 1
    monkeypatch.undo()
    make_answers(folder, tiny_target, CONFIG, prompts())
    assert read_answers(folder).sha256 == read_answers(tmp_path / "whole" / "answers").sha256


def test_answers_of_another_target_are_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    make_answers(tmp_path, tiny_target, CONFIG, prompts())
    with pytest.raises(ValueError, match="another target"):
        make_answers(tmp_path, replace(tiny_target, sha256="0" * 64), CONFIG, prompts())


def test_answers_with_other_settings_are_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    make_answers(tmp_path, tiny_target, CONFIG, prompts())
    with pytest.raises(ValueError, match=r"answers\.temperature=0\.8, not 0\.5"):
        make_answers(tmp_path, tiny_target, replace(CONFIG, temperature=0.5), prompts())


def test_prompts_are_cut_from_a_folder_of_ones_own(tiny_target: FrozenTarget, text_folder: Path) -> None:
    config = replace(CONFIG, documents=str(text_folder), min_prompt_tokens=10, max_prompt_tokens=60)
    found = cut_prompt_ids(config, CorpusConfig(), tiny_target.tokenizer)
    assert len(found) == 10
    assert all(10 <= len(ids) <= 60 for ids in found)


def test_unknown_documents_name_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="training, held_out or a folder"):
        cut_prompt_ids(replace(CONFIG, documents="nowhere"), CorpusConfig(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("count", 0), ("max_prompt_tokens", 4), ("greedy_share", 1.5), ("temperature", 0.0)]
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"answers.{field}"):
        replace(CONFIG, **{field: value})
