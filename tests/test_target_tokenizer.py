"""The tokenizer of the tests' target: exact round trips, indentation as one token, nothing added."""

import pytest
from fixture_models import TARGET, VOCABULARY
from fixtures.target import END_OF_TEXT
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "",
    "def f(self):\n        return 12345\n",
    "  leading and trailing   \n\n \t x , y . 's  ",
    "naïve 日本語 🙂 \u200b\r\n",
    "a == b\n\n\n\n    # don't\n",
]


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "code", "spaces", "unicode", "blank_lines"])
def test_round_trip_is_exact(text: str, trained: PreTrainedTokenizerFast) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_nothing_is_added(trained: PreTrainedTokenizerFast) -> None:
    assert trained.encode("") == []
    assert trained.eos_token_id not in trained.encode("x = 1\n")


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5])
def test_newline_and_indentation_are_one_token(trained: PreTrainedTokenizerFast, depth: int) -> None:
    assert len(trained.encode("\n" + "    " * depth)) == 1


def test_cut_before_a_newline_keeps_the_tokens_before_it(trained: PreTrainedTokenizerFast) -> None:
    text = "class Box:\n    def size(self):\n        return 3\n"
    whole = trained.encode(text)
    for end in (i for i, character in enumerate(text) if character == "\n"):
        prefix = trained.encode(text[:end])
        assert whole[: len(prefix)] == prefix


def test_trained_size_and_special_token(trained: PreTrainedTokenizerFast) -> None:
    assert len(trained) == VOCABULARY
    assert trained.bos_token == trained.eos_token == END_OF_TEXT
    assert trained.encode(END_OF_TEXT) == [trained.eos_token_id] == [0]
