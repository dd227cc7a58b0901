"""The tokenizer: exact round trips, indentation as one token, nothing added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixture_models import TARGET, VOCABULARY
from fixtures.target_trainer.tokenizer import END_OF_TEXT, save_tokenizer, token_byte_lengths, train_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SAMPLE = ["def f(self, x):\n    if x:\n        return self.value\n\n\nclass A:\n    pass\n"] * 4
TEXTS = [
    "",
    "def f(self):\n        return 12345\n",
    "  leading and trailing   \n\n \t x , y . 's  ",
    "naïve 日本語 🙂 \u200b\r\n",
    "a == b\n\n\n\n    # don't\n",
]


@pytest.fixture(scope="module")
def small() -> PreTrainedTokenizerFast:
    return train_tokenizer(SAMPLE, 320)


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.mark.parametrize("text", TEXTS, ids=["empty", "code", "spaces", "unicode", "blank_lines"])
@pytest.mark.parametrize("name", ["small", "trained"])
def test_round_trip_is_exact(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


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


def test_byte_lengths_add_up(small: PreTrainedTokenizerFast) -> None:
    lengths = token_byte_lengths(small)
    for text in TEXTS:
        assert sum(lengths[i] for i in small.encode(text)) == len(text.encode())
    assert lengths[small.eos_token_id] == 0


def test_saved_config_names_the_portable_class(small: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(small, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(SAMPLE[0]) == small.encode(SAMPLE[0])


def test_vocabulary_too_small_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"model\.vocab_size must be at least 257"):
        train_tokenizer(SAMPLE, 100)
