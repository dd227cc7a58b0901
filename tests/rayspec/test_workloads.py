"""Prompts from named sets and from files."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rayspec.workloads import load_workload

SYSTEM = {"role": "system", "content": "S"}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("record", "id_", "category", "text"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["Hi", "More"]}, "81", "writing", "Hi"),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, "HumanEval/0", "data", "def f():\n"),
        ({"question": "How many?", "answer": "4"}, "1", "data", "How many?"),
        (
            {"id": "c", "conversations": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]},
            "c",
            "data",
            "U",
        ),
        ({"text": "plain"}, "1", "data", "plain"),
    ],
    ids=["mt_bench", "humaneval", "gsm8k", "conversation", "text"],
)
def test_published_forms(tmp_path: Path, record: dict[str, Any], id_: str, category: str, text: str) -> None:
    (prompt,) = load_workload(str(write(tmp_path / "data.jsonl", record)))
    assert (prompt.id, prompt.category, prompt.text) == (id_, category, text)


def test_gzip_is_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "x"}) + "\n\n")
    for spec in (f"{tmp_path}/p.jsonl.gz", f"{tmp_path}/p.jsonl.gz:1", f"humaneval:{tmp_path}/p.jsonl.gz:1"):
        assert [p.text for p in load_workload(spec)] == ["x"]


def test_order_is_fixed_by_the_seed_and_counts_are_prefixes(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *({"text": f"t{i}"} for i in range(50)))
    first = load_workload(str(file), seed=3)
    assert load_workload(str(file), seed=3) == first
    assert load_workload(f"{file}:7", seed=3) == first[:7]
    assert load_workload(str(file), seed=4) != first
    assert sorted(p.text for p in first) == sorted(f"t{i}" for i in range(50))


def test_later_turns_are_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_workload(str(write(tmp_path / "p.jsonl", {"turns": ["a", "b"]}, {"turns": ["c", "d"]})))
    assert caplog.text.count("only the first turn is sent") == 1


def test_shipped_prompts_load() -> None:
    assert len(load_workload("heldout_python:32")) == 32


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"text": '], r"p.jsonl:2: no valid JSON"),
        (['{"text": "a"}', "[1]"], r"p.jsonl:2: expected a JSON object, got list"),
        (['{"tex": "a"}'], r"p.jsonl:1: no prompt in the record; expected one of .*got tex"),
        (['{"turns": []}'], r"p.jsonl:1: turns must be a list of at least one text"),
        (['{"text": " "}'], r"p.jsonl:1: the prompt must be text that is not empty"),
        (['{"conversations": [{"role": "user"}]}'], r"p.jsonl:1: conversations must be a list of"),
        (['{"conversations": [{"role": "system", "content": "x"}]}'], r"no message of role 'user'"),
        (['{"id": 1, "text": "a"}', '{"id": 1, "text": "b"}'], "1 records repeat an id"),
        ([""], "holds no record"),
    ],
)
def test_malformed_file_is_refused_with_its_line(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        load_workload(f"{tmp_path}/p.jsonl")


def test_more_prompts_than_there_are_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"text": "a"})
    with pytest.raises(ValueError, match=r"asks for 2 prompts, but .* holds 1"):
        load_workload(f"{file}:2")
    with pytest.raises(ValueError, match="at least 1"):
        load_workload(f"{file}:0")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no workload 'heldout_pyton'.*heldout_python, mixed_languages, humaneval"):
        load_workload("heldout_pyton:4")


def test_published_set_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAYSPEC_DATA", raising=False)
    with pytest.raises(
        ValueError, match=r"RAYSPEC_DATA is not set. Nothing is downloaded.*github.com/openai/human-eval"
    ):
        load_workload("humaneval:4")
    monkeypatch.setenv("RAYSPEC_DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "test.jsonl", {"question": "q"})
    assert load_workload("gsm8k")[0].text == "q"
