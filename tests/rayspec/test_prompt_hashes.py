"""Which prompts are for evaluation."""

import json
import os
from pathlib import Path

import pytest

from rayspec.workloads import load_workload
from rayspec.workloads.prompt_hashes import (
    PUBLISHED_HASHES,
    REPORTED,
    evaluation_hashes,
    hashes,
    part_hashes,
    prompt_hash,
)
from rayspec.workloads.published import DATA_VARIABLE, PUBLISHED, load_named


def shipped() -> dict[str, list[str]]:
    return {name: found.split() for name, found in json.loads(PUBLISHED_HASHES.read_text()).items()}


def test_a_published_set_is_told_where_its_file_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one prompt of each that its paper prints."""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    janet = (
        "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her "
        "friends every day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. "
        "How much in dollars does she make every day at the farmers' market?"
    )
    hawaii = (
        "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural experiences and "
        "must-see attractions."
    )
    greatest = (
        "def greatest_common_divisor(a: int, b: int) -> int:\n"
        '    """ Return a greatest common divisor of two integers a and b\n'
        '    >>> greatest_common_divisor(3, 5)\n    1\n    >>> greatest_common_divisor(25, 15)\n    5\n    """\n'
    )
    assert {prompt_hash(text) for text in (janet, hawaii, greatest)} <= evaluation_hashes()
    assert hashes(load_workload("chat")) <= evaluation_hashes()
    assert prompt_hash("Name a fruit.") not in evaluation_hashes()


def test_what_lies_under_the_data_folder_is_for_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mt_bench").mkdir()
    (tmp_path / "mt_bench" / "question.jsonl").write_text('{"turns": ["Name a fruit.", "Another one?"]}\n')
    before = evaluation_hashes()
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    found = {prompt_hash("name a fruit"), prompt_hash("another one")}
    assert not found & before
    assert found <= evaluation_hashes()


def test_a_prompt_is_told_however_it_is_set() -> None:
    same = ["Is a Café open?", "is a cafe\u0301 open", "```python\nIs a Café open?\n```", "Is a\u200b CAFÉ\topen?!"]
    assert len({prompt_hash(text) for text in same}) == 1
    assert prompt_hash("Is a café shut?") not in {prompt_hash(text) for text in same}


def test_a_prompt_is_told_as_a_paragraph() -> None:
    found = part_hashes("Answer this:\n\nIs a café open?\n \nThink first.")
    assert {prompt_hash("Is a café open?"), prompt_hash("Think first.")} < found
    assert prompt_hash("Is a café open?") not in part_hashes("Answer this: Is a café open?")


@pytest.mark.parametrize("name", REPORTED)
def test_what_ships_are_the_hashes_of_the_published_file(name: str) -> None:
    if not (Path(os.environ.get(DATA_VARIABLE, "")) / PUBLISHED[name].file).is_file():
        pytest.skip(f"${DATA_VARIABLE} has no {PUBLISHED[name].file}")
    assert shipped()[name] == sorted(hashes(load_named(name)))


def test_every_set_that_papers_report_has_its_hashes() -> None:
    assert {name: len(found) for name, found in shipped().items()} == {
        "gsm8k": 1319,
        "humaneval": 163,
        "mt_bench": 160,
        "spec_bench": 560,
    }
