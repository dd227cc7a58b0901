"""Prompts that a target writes itself: which are kept, and that a killed run goes on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from chats import Scripted, chat_tokenizer

from rayspec.training.data.answers import AnswersConfig
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.self_prompts import is_sensible, new_and_sensible, write_prompts
from rayspec.workloads.prompt_hashes import prompt_hash

CONFIG = AnswersConfig(count=3, batch_size=2, max_prompt_tokens=40, openings=[""])
FIG, ELM, OAK, ASH = (
    f"Tell me about the {tree}<|im_end|>" for tree in ("fig tree", "elm tree", "oak tree", "ash tree")
)


@pytest.fixture
def chat(tiny_target_folder: Path) -> ChatTemplate:
    return ChatTemplate.of(chat_tokenizer(tiny_target_folder))


def texts(*said: str) -> list[str]:
    return [text.removesuffix("<|im_end|>") for text in said]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("What is the tallest tree?", True),
        ("too short", False),
        ("onelongwordwithoutspaces", False),
        ("go go go go go go go go", False),
        ("1 + 2 + 3 + 4 = 5 + 6 + 7", False),
        ("Write a poem <|im_start|> about rain", False),
    ],
)
def test_what_could_be_a_person_s(text: str, kept: bool) -> None:
    assert is_sensible(text) == kept


def test_case_spaces_and_punctuation_make_no_other_prompt() -> None:
    assert prompt_hash("What is  a fig?\n") == prompt_hash("what is a fig")
    assert prompt_hash("What is a fig?") != prompt_hash("What is a figure?")
    first, again, other = "What is a fig?", "what is a FIG", "What is an elm?"
    assert new_and_sensible([first, None, again, other], {prompt_hash("What is an oak?")}) == [first, other]
    assert new_and_sensible([first, other], {prompt_hash(again)}) == [other]
    assert new_and_sensible([f"Answer this in short:\n\n{first}", other], {prompt_hash(first)}) == [other]


def test_the_target_writes_from_where_a_user_begins(chat: ChatTemplate, tmp_path: Path) -> None:
    """What did not end, is there already or must be avoided does not count, and goes on until there are enough."""
    answer = Scripted(chat.tokenizer, [FIG, "Tell me about the"], [FIG, ELM], [OAK, ASH])
    found = write_prompts(tmp_path, CONFIG, chat, answer, avoid={prompt_hash(texts(OAK)[0])})
    assert found == texts(FIG, ELM, ASH)
    for request in (r for batch in answer.asked for r in batch):
        assert chat.tokenizer.decode(request.prompt_ids) == "<|im_start|>user\n"
        assert (request.stop_ids, request.max_new_tokens) == ((chat.user_stop,), 40)
        assert request.temperature > 0


def test_messages_begin_as_they_are_asked_to(chat: ChatTemplate, tmp_path: Path) -> None:
    """The target continues each beginning in turn, and the message holds it."""
    answer = Scripted(chat.tokenizer, [FIG, " a poem about rain<|im_end|>"])
    found = write_prompts(tmp_path, replace(CONFIG, count=2, openings=["", "Write"]), chat, answer)
    assert found == [*texts(FIG), "Write a poem about rain"]
    begun = [chat.tokenizer.decode(request.prompt_ids) for request in answer.asked[0]]
    assert begun == ["<|im_start|>user\n", "<|im_start|>user\nWrite"]


def test_a_killed_run_goes_on_behind_its_last_batch(chat: ChatTemplate, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_prompts(tmp_path, CONFIG, chat, Scripted(chat.tokenizer, [FIG, ELM], None))
    answer = Scripted(chat.tokenizer, [ELM, OAK])
    assert write_prompts(tmp_path, CONFIG, chat, answer) == texts(FIG, ELM, OAK)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["prompts-00000.jsonl", "prompts-00001.jsonl"]
    assert json.loads(files[1].read_text()) == {"turns": texts(OAK)}
    nothing = Scripted(chat.tokenizer)
    assert write_prompts(tmp_path, CONFIG, chat, nothing) == texts(FIG, ELM, OAK)
    assert nothing.asked == []


def test_a_target_that_writes_nothing_usable_is_given_up(chat: ChatTemplate, tmp_path: Path) -> None:
    answer = Scripted(chat.tokenizer, *[["no", "no"]] * 9)
    with pytest.raises(ValueError, match=r"wrote 0 usable prompts in 8, too few for 1; name a workload or a folder"):
        write_prompts(tmp_path, replace(CONFIG, count=1), chat, answer)


@pytest.mark.parametrize("line", ['{"turns": ["Name', '{"turn": ["Name a fruit."]}', '{"turns": []}', '{"turns": [3]}'])
def test_a_damaged_file_of_prompts_is_named(line: str, chat: ChatTemplate, tmp_path: Path) -> None:
    (tmp_path / "prompts-00000.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=r"prompts-00000.jsonl holds .*; delete it to have them written again"):
        write_prompts(tmp_path, CONFIG, chat, Scripted(chat.tokenizer))


def test_a_prompt_may_hold_any_character(chat: ChatTemplate, tmp_path: Path) -> None:
    """A line separator, say, at which no line of the file ends."""
    odd = "Tell me about\u2028the fig tree"
    (tmp_path / "prompts-00000.jsonl").write_text(json.dumps({"turns": [odd]}, ensure_ascii=False) + "\n")
    assert write_prompts(tmp_path, replace(CONFIG, count=1), chat, Scripted(chat.tokenizer)) == [odd]
