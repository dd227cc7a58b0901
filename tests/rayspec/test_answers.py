import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from answerers import InTurn, answer_in_process, answerer, as_prompts, name_of
from pyarrow import parquet as pq
from safetensors.torch import load_file, save_file

from rayspec.training.data.answers import AnswersConfig, check_index, make_answers, read_answers
from rayspec.training.data.asking import Request
from rayspec.training.data.shards import SCHEMA, read_shard, shard_files
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


def drawn(target: FrozenTarget) -> InTurn:
    """What is drawn hangs on the request alone, as from engines that take its seed."""

    def one(request: Request) -> list[int]:
        generator = torch.Generator().manual_seed(request.seed or 0)
        return torch.randint(1, 257, (request.max_new_tokens - 2,), generator=generator).tolist()

    return InTurn(lambda requests: [one(r) for r in requests])


def test_a_shard_hangs_on_its_number_and_the_seed_alone(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    """Made whatever else was made before it, and from a seed of its own for each sequence and set."""

    class Backwards(InTurn):
        def run(self, pieces: Any) -> Any:
            return reversed(list(super().run(pieces)))

    target, drawing = name_of(tiny_target), drawn(tiny_target)
    make_answers(tmp_path / "a" / "answers", target, CONFIG, as_prompts(prompts()), drawing)
    make_answers(tmp_path / "b" / "answers", target, CONFIG, as_prompts(prompts()), Backwards(drawing.answer))
    (tmp_path / "b" / "answers" / "answers-00001.parquet").unlink()
    make_answers(tmp_path / "b" / "answers", target, CONFIG, as_prompts(prompts()), drawing)
    one, other = (read_answers(tmp_path / name / "answers") for name in "ab")
    assert one.sha256 == other.sha256
    make_answers(tmp_path / "held_out", target, CONFIG, as_prompts(prompts()), drawing)
    make_answers(tmp_path / "c" / "answers", target, replace(CONFIG, seed=4), as_prompts(prompts()), drawing)
    answers = [
        ids[n : n + 10].tolist()
        for rows in (one, read_answers(tmp_path / "held_out"), read_answers(tmp_path / "c" / "answers"))
        for ids, n, t in zip(rows.token_ids_NL, rows.prompt_length_N, rows.temperature_N, strict=True)
        if t > 0
    ]
    assert len({tuple(ids) for ids in answers}) == 15


def test_anyone_can_read_a_shard(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path, tiny_target, CONFIG, prompts())
    frame = pd.read_parquet(tmp_path / "answers-00001.parquet")
    assert frame["id"].tolist() == [4, 5, 6, 7]
    assert frame["prompt"].tolist() == [str(ids) for ids in prompts()[4:8]]
    stored = read_answers(tmp_path)
    for n, row in zip(range(4, 8), frame.itertuples(), strict=True):
        assert row.token_ids.tolist() == stored.token_ids_NL[n, : stored.length_N[n]].tolist()
        assert row.loss_mask.tolist() == [i >= row.prompt_length for i in range(len(row.token_ids))]
        assert row.temperature == pytest.approx(CONFIG.temperature_of(n))


def as_before(folder: Path, number: int) -> None:
    """A shard in the form of earlier releases."""
    file = shard_files(folder)[number]
    shard = read_shard(file)
    width = int(shard.length_N.max())
    tensors = {
        "token_ids": shard.padded(shard.ids_M, width),
        "loss_mask": shard.padded(shard.mask_M, width),
        "prompt_length": shard.prompt_length_N,
        "length": shard.length_N,
        "temperature": shard.temperature_N,
    }
    save_file(tensors, file.with_suffix(".safetensors"))
    file.unlink()


def test_a_folder_of_an_earlier_release_is_read_and_grows(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    greedy = replace(CONFIG, greedy_share=1.0, count=8)
    answer_in_process(tmp_path, tiny_target, greedy, prompts())
    before = read_answers(tmp_path)
    for number in (0, 1):
        as_before(tmp_path, number)
    after = read_answers(tmp_path)
    for name in ("token_ids_NL", "loss_mask_NL", "prompt_length_N", "length_N", "temperature_N"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    answer_in_process(tmp_path, tiny_target, replace(greedy, count=10), prompts())
    suffixes = [file.suffix for file in shard_files(tmp_path).values()]
    assert suffixes == [".safetensors", ".safetensors", ".parquet"]
    assert torch.equal(read_answers(tmp_path).token_ids_NL[:8, : before.token_ids_NL.shape[1]], before.token_ids_NL)


def test_what_is_no_shard_is_refused(tiny_target: FrozenTarget, tmp_path: Path) -> None:
    answer_in_process(tmp_path, tiny_target, CONFIG, prompts())
    file = tmp_path / "answers-00001.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"answers-00001.parquet is no whole Parquet file .*delete it to have it made"):
        read_answers(tmp_path)
    pd.DataFrame({"id": [1], "token_ids": [[1, 2]]}).to_parquet(file)
    with pytest.raises(ValueError, match=r"00001.parquet holds no answers \(loss_mask, prompt, prompt_length, temper"):
        read_answers(tmp_path)
    frame = pd.read_parquet(tmp_path / "answers-00000.parquet")
    frame.assign(loss_mask=[[True]] * len(frame)).to_parquet(file)
    with pytest.raises(ValueError, match="loss_mask is not as long as token_ids"):
        read_answers(tmp_path)
    frame.assign(token_ids="text").to_parquet(file)
    with pytest.raises(ValueError, match=r"00001.parquet holds no answers"):
        read_answers(tmp_path)
    frame.assign(temperature=None).to_parquet(file)
    with pytest.raises(ValueError, match="temperature has gaps"):
        read_answers(tmp_path)
    for change, problem in (
        ({"prompt_length": 99}, "a prompt_length that is not within its sequence"),
        ({"token_ids": [[-1] * len(ids) for ids in frame["token_ids"]]}, "the token -1"),
        ({"token_ids": [[]] * len(frame), "loss_mask": [[]] * len(frame)}, "a sequence without tokens"),
    ):
        frame.assign(**change).to_parquet(file)
        with pytest.raises(ValueError, match=rf"00001.parquet holds no answers \({problem}\); delete it to have it"):
            read_answers(tmp_path)
    pq.write_table(SCHEMA.empty_table(), file)
    with pytest.raises(ValueError, match=r"00001.parquet holds no answers \(no sequence\)"):
        read_answers(tmp_path)
    file.write_bytes(whole)
    as_before(tmp_path, 1)
    old = file.with_suffix(".safetensors")
    tensors = load_file(old)
    mask, length = tensors["loss_mask"][:, 1:], tensors["length"]
    for change in ({"loss_mask": mask}, {"length": length + 99}, {"length": length[:1]}):
        save_file({name: t.contiguous() for name, t in {**tensors, **change}.items()}, old)
        with pytest.raises(ValueError, match=r"00001.safetensors holds no answers \(its tensors do not fit each other"):
            read_answers(tmp_path)
    file.write_bytes(whole)
    file.with_suffix(".safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds shard 00001 twice, as .parquet and .safetensors; delete one"):
        read_answers(tmp_path)


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
