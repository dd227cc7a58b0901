"""The corpus: which files count as source, that the split is by content, and where prompts are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from documents import CODE, make_document
from fixture_models import PROMPTS, TARGET
from transformers import AutoTokenizer

from rayspec.training.data.corpus import cut_prompt_records, held_out_documents, training_documents
from rayspec.training.data.sources import (
    STDLIB,
    STDLIB_TESTS,
    CorpusConfig,
    Document,
    discover,
    is_usable_source,
)


@pytest.fixture
def documents(tmp_path: Path) -> list[Document]:
    made = [make_document(tmp_path, i, package) for package in (STDLIB, "pkg") for i in range(200)]
    return sorted(made, key=lambda d: d.sha256)


def test_split_is_disjoint_and_covers_everything(documents: list[Document]) -> None:
    config = CorpusConfig(held_out_percent=20)
    training = {d.sha256 for d in training_documents(config, documents)}
    held_out = {d.sha256 for d in held_out_documents(config, documents)}
    assert training
    assert held_out
    assert not training & held_out
    assert training | held_out == {d.sha256 for d in documents}


def test_split_depends_on_content_alone(documents: list[Document], tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = make_document(elsewhere, 7)
    original = next(d for d in documents if d.name == "pkg_7.py")
    assert original.path != copy.path
    assert [original.is_held_out(p) for p in range(100)] == [copy.is_held_out(p) for p in range(100)]


def test_cap_limits_packages_but_not_the_standard_library(documents: list[Document]) -> None:
    config = CorpusConfig(package_cap_bytes=1_000)
    kept = training_documents(config, documents)
    assert 900 < sum(d.num_bytes for d in kept if d.package.name == "pkg") <= 1_000
    assert sum(d.package.name == STDLIB for d in kept) > 150


def test_discovery_is_stable_relative_and_without_duplicates() -> None:
    config = CorpusConfig(min_bytes=90_000, max_bytes=91_000)  # a handful of files: seconds, not a full read
    first, second = discover(config), discover(config)
    assert [d.sha256 for d in first] == [d.sha256 for d in second]
    assert len({d.sha256 for d in first}) == len(first)
    assert not any(d.name.startswith("/") for d in first)


@pytest.mark.parametrize(
    "content",
    [
        b"x = '\xff'\n",
        b"x = 1\r\ny = 2\r\n",
        b"x = '" + b"a" * 2000 + b"'\n",
        b"table = [\n" + b"    1, 2, 3,\n" * 50 + b"]\n",
        b"\n\n",
    ],
    ids=["not_utf8", "windows_lines", "very_long_line", "data_table", "blank"],
)
def test_unusable_source_is_refused(content: bytes) -> None:
    assert not is_usable_source(content)


def test_ordinary_code_is_usable() -> None:
    assert is_usable_source(CODE.encode())


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(range(len(text.split())))


def test_prompts_are_whole_lines_of_the_documents(documents: list[Document]) -> None:
    records = cut_prompt_records(WordTokenizer(), documents, count=50, prompt_tokens=(3, 12), seed=1)
    prompts = [record.text for record in records]
    texts = [d.text for d in documents]
    assert len(prompts) == 50
    for prompt in prompts:
        assert 3 <= len(prompt.split()) <= 12
        assert not prompt.endswith("\n")
        assert any(prompt + "\n" in text for text in texts)


def test_prompts_follow_the_seed(documents: list[Document]) -> None:
    cuts = [cut_prompt_records(WordTokenizer(), documents, count=20, prompt_tokens=(3, 12), seed=s) for s in (1, 1, 2)]
    assert cuts[0] == cuts[1] != cuts[2]


def test_too_few_prompts_is_an_error(documents: list[Document]) -> None:
    with pytest.raises(ValueError, match="of 10 prompts"):
        cut_prompt_records(WordTokenizer(), documents[:1], count=10, prompt_tokens=(500, 600), seed=0)


def test_bad_config_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"corpus\.held_out_percent must be in 1\.\.50, got 0"):
        CorpusConfig(held_out_percent=0)


def test_prompts_of_the_tests_are_distinct_and_in_bounds() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    assert len({line["question_id"] for line in lines}) == len({line["turns"][0] for line in lines}) == len(lines)
    assert {line["category"] for line in lines} == {STDLIB, STDLIB_TESTS}, "text under other licences may not ship"
    assert all(32 <= len(tokenizer.encode(line["turns"][0])) <= 160 for line in lines)
