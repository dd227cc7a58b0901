"""Which prompts are for evaluation."""

import json
import os
from pathlib import Path

import pytest

from rayspec.workloads import load_workload
from rayspec.workloads.prompt_hashes import PUBLISHED_HASHES, evaluation_hashes, hashes, prompt_hash
from rayspec.workloads.published import DATA_VARIABLE, load_named

REPORTED = ("gsm8k", "humaneval", "mt_bench", "spec_bench")


def shipped() -> dict[str, list[str]]:
    return json.loads(PUBLISHED_HASHES.read_text())


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
    assert {prompt_hash(janet), prompt_hash(hawaii)} <= evaluation_hashes()
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


@pytest.mark.skipif(DATA_VARIABLE not in os.environ, reason=f"${DATA_VARIABLE} names no folder of the published sets")
@pytest.mark.parametrize("name", REPORTED)
def test_what_ships_are_the_hashes_of_the_published_file(name: str) -> None:
    assert shipped()[name] == sorted(hashes(load_named(name)))


def test_every_set_that_papers_report_has_its_hashes() -> None:
    assert {name: len(found) for name, found in shipped().items()} == {
        "gsm8k": 1319,
        "humaneval": 163,
        "mt_bench": 160,
        "spec_bench": 560,
    }
