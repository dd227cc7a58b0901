"""A chat template cut into pieces: what grows from them is what the tokenizer's own template says."""

from pathlib import Path

import pytest
from chats import HARMONY, TEMPLATES, TURNS, chat_tokenizer

from rayspec.training.data.chat import ChatTemplate


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_grown_conversation_is_the_template_s(template: str, tiny_target_folder: Path) -> None:
    tokenizer = chat_tokenizer(tiny_target_folder, TEMPLATES[template])
    chat = ChatTemplate.of(tokenizer)
    assert ("Be brief." in chat.opening) == (template == "system")
    turns = ["Name a fruit.", "fig", " And a  nut?\n", "elm\n\n", "Is that one?"]
    ids = chat.first_turn(turns[0])
    for answer, question in zip(turns[1::2], turns[2::2], strict=True):
        ids += [*chat.encode(answer), tokenizer.eos_token_id, *chat.next_turn(question)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_stop_token_of_the_template_is_not_said_twice(tiny_target_folder: Path) -> None:
    """As Gemma's end of a turn, which is not its end of text: the target ends its answers by it."""
    tokenizer = chat_tokenizer(tiny_target_folder, eos="<|endoftext|>")
    chat = ChatTemplate.of(tokenizer)
    assert chat.answer_stop == chat.user_stop
    answer = [*chat.encode("fig"), chat.user_stop]
    ids = [*chat.first_turn("Name a fruit."), *answer, *chat.next_turn("And a nut?")]
    given = [ids for ids, _ in chat.as_given(["fig", "elm"], ["And a nut?"], 64, 64)]
    messages = [
        {"role": "user", "content": "Name a fruit."},
        {"role": "assistant", "content": "fig"},
        {"role": "user", "content": "And a nut?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids == [*chat.first_turn("Name a fruit."), *given[0], *given[1]]


def test_answers_that_the_template_writes_otherwise_are_not_taken_as_given(tiny_target_folder: Path) -> None:
    chat = ChatTemplate.of(chat_tokenizer(tiny_target_folder, HARMONY))
    with pytest.raises(ValueError, match=r"writes answers of the past otherwise.*leave as_given out"):
        list(chat.as_given(["fig"], [], 64, 64))


def test_a_message_of_the_user_ends_with_its_stop_token(tiny_target_folder: Path) -> None:
    chat = ChatTemplate.of(chat_tokenizer(tiny_target_folder))
    said = chat.encode(" What is a quine?\n")
    assert chat.message([*said, chat.user_stop]) == "What is a quine?"
    assert chat.message(said) is None, "cut off at the longest"
    assert chat.message([]) is None


FAULTS = {
    "none": (None, "has no chat template, so it cannot write or answer chats; name a folder of text files"),
    "changed": (TURNS.replace("m['content']", "m['content'] | upper"), "does not repeat its messages as they are"),
    "no_stop": (TURNS.replace("<|im_end|>\n", "\n"), "ends a message of the user by no special token"),
    "other_asking": (
        TURNS.replace("<|im_end|>\n{%", "<|im_end|>{{ loop.index }}\n{%"),
        "does not repeat its messages as they are",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_template_that_cannot_be_cut_is_refused(fault: str, tiny_target_folder: Path) -> None:
    template, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        ChatTemplate.of(chat_tokenizer(tiny_target_folder, template))
