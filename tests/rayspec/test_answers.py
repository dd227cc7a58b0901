import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from answerers import InTurn, answer_in_process, answerer, as_prompts, name_of

from rayspec.training.data.answers import AnswersConfig, check_index, make_answers, read_answers
from rayspec.training.data.asking import Request
from rayspec.training.frozen_target import FrozenTarget

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


def test_stored_answers_are_what_was_generated(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path / "a", tiny_target, CONFIG, prompts())
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


def test_a_resumed_run_keeps_its_shards_and_makes_the_rest(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    greedy = replace(CONFIG, greedy_share=1.0)
    answer_in_process(tmp_path / "whole" / "answers", tiny_target, greedy, prompts())
    asked, folder = [], tmp_path / "cut" / "answers"
    own = answerer(tiny_target)

    def interrupted(requests: Sequence[Request]) -> list[list[int]]:
        asked.append(len(requests))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return own.answer(requests)

    with pytest.raises(KeyboardInterrupt):
        make_answers(folder, name_of(tiny_target), greedy, as_prompts(prompts()), InTurn(interrupted))
    assert [file.name for file in folder.glob("answers-*")] == ["answers-00000.parquet"]
    make_answers(folder, name_of(tiny_target), greedy, as_prompts(prompts()), InTurn(interrupted))
    assert asked == [4, 4, 4, 2], "the first shard is not made again"
    assert read_answers(folder).sha256 == read_answers(tmp_path / "whole" / "answers").sha256


def test_answers_of_another_target_are_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path, tiny_target, CONFIG, prompts())
    with pytest.raises(ValueError, match="another target"):
        answer_in_process(tmp_path, replace(tiny_target, sha256="0" * 64), CONFIG, prompts())


def test_answers_with_other_settings_are_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path, tiny_target, CONFIG, prompts())
    with pytest.raises(ValueError, match=r"answers\.temperature=0\.8, not 0\.5"):
        answer_in_process(tmp_path, tiny_target, replace(CONFIG, temperature=0.5), prompts())


def test_answers_from_before_prompts_had_openings_can_be_used(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path, tiny_target, CONFIG, prompts())
    index = json.loads((tmp_path / "answers.json").read_text())
    del index["config"]["openings"]
    (tmp_path / "answers.json").write_text(json.dumps(index))
    check_index(tmp_path, tiny_target.sha256, replace(CONFIG, openings=[""]))
    with pytest.raises(ValueError, match=r"answers\.openings=\[''\], not \['Write'\]"):
        check_index(tmp_path, tiny_target.sha256, replace(CONFIG, openings=["Write"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", 0), ("openings", []), ("max_prompt_tokens", 4), ("greedy_share", 1.5), ("temperature", 0.0)],
)
def test_bad_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(CONFIG, **{field: value})
