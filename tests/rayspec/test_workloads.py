"""Conversations from named sets and from files."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayspec.workloads import load_workload
from rayspec.workloads.published import PUBLISHED, HubDataset

DATA = os.environ.get("RAYSPEC_DATA", "")
needs_data = pytest.mark.skipif(
    not (Path(DATA) / "mt_bench").is_dir(), reason="the published prompts are not under $RAYSPEC_DATA"
)


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("record", "id_", "category", "turns"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["Hi", "More"]}, "81", "writing", ("Hi", "More")),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n"}, "HumanEval/0", "data", ("def f():\n",)),
        ({"question": "How many?", "answer": "4"}, "1", "data", ("How many?",)),
        ({"text": "plain"}, "1", "data", ("plain",)),
    ],
    ids=["mt_bench", "humaneval", "gsm8k", "text"],
)
def test_published_forms(tmp_path: Path, record: dict[str, Any], id_: str, category: str, turns: tuple) -> None:
    (found,) = load_workload(str(write(tmp_path / "data.jsonl", record)))
    assert (found.id, found.category, found.turns) == (id_, category, turns)
    assert found.is_chat == ("text" not in record)


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_recorded_answers_are_no_turns(tmp_path: Path, key: str) -> None:
    said = [message("system", "S"), message("user", "U"), message("assistant", "A"), message("user", "V")]
    (found,) = load_workload(str(write(tmp_path / "p.jsonl", {"id": "c", key: [*said, message("assistant", "B")]})))
    assert (found.id, found.system, found.turns, found.answers) == ("c", "S", ("U", "V"), ("A", "B"))
    (other,) = load_workload(str(write(tmp_path / "p.jsonl", {"id": "c", key: said})))
    assert other.answers == ("A",)
    assert other == found, "whoever asks a target takes no notice of them"


@pytest.mark.parametrize("second", [["B", "C"], [], [" "], [None], ["\ud800"]], ids=str)
def test_answers_end_at_a_turn_without_one_text(tmp_path: Path, second: list[Any]) -> None:
    said = [message("user", "U"), message("assistant", "A"), message("user", "V")]
    said += [message("assistant", text) for text in second] + [message("user", "W"), message("assistant", "D")]
    (found,) = load_workload(str(write(tmp_path / "p.jsonl", {"messages": said})))
    assert (found.turns, found.answers) == (("U", "V", "W"), ("A",))


def test_gzip_is_read(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "x"}) + "\n\n")
    for spec in (f"{tmp_path}/p.jsonl.gz", f"{tmp_path}/p.jsonl.gz:1", f"humaneval:{tmp_path}/p.jsonl.gz:1"):
        assert [c.turns for c in load_workload(spec)] == [("x",)]


def test_order_is_fixed_by_the_seed_and_counts_are_prefixes(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *({"text": f"t{i}"} for i in range(50)))
    first = load_workload(str(file), seed=3)
    assert load_workload(str(file), seed=3) == first
    assert load_workload(f"{file}:7", seed=3) == first[:7]
    assert load_workload(str(file), seed=4) != first
    assert sorted(c.turns[0] for c in first) == sorted(f"t{i}" for i in range(50))


def test_a_category_is_selected(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", *({"text": f"{i}", "category": "ab"[i % 2]} for i in range(10)))
    assert len(load_workload(f"{file}::a")) == 5
    assert {c.category for c in load_workload(f"{file}:3:b")} == {"b"}
    with pytest.raises(ValueError, match="no category 'c'; there are a, b"):
        load_workload(f"{file}:3:c")
    with pytest.raises(ValueError, match="asks for 6 prompts, but there are 5"):
        load_workload(f"{file}:6:a")


def test_a_mix_is_shuffled_together_with_ids_that_say_where_from(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", *({"text": f"a{i}"} for i in range(9)))
    b = write(tmp_path / "b.jsonl", *({"text": f"b{i}"} for i in range(9)))
    found = load_workload(f"{a}:8, {b}:4, chat:4", seed=1)
    assert Counter(c.id.rpartition("/")[0] for c in found) == {str(a): 8, str(b): 4, "chat": 4}
    assert [c.id.rpartition("/")[0] for c in found[:8]] != [str(a)] * 8
    assert found == load_workload(f"{a}:8, {b}:4, chat:4", seed=1)
    with pytest.raises(ValueError, match="and 3 others more than once"):
        load_workload(f"{a}:4,{a}:6")


def test_a_colon_can_belong_to_a_path(tmp_path: Path) -> None:
    file = write(tmp_path / "p:3.jsonl", {"text": "x"})
    plain = write(tmp_path / "p:1", {"text": "y"})
    assert load_workload(f"{file}:1")[0].turns == ("x",)
    assert load_workload(str(plain))[0].turns == ("y",)


def test_fewer_prompts_are_the_beginning_of_more() -> None:
    found = load_workload("chat:40", seed=0)
    assert len({c.id for c in found}) == 40
    assert found[:16] == load_workload("chat:16", seed=0)
    assert found[:16] != load_workload("chat:16", seed=1)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b'{"text": "a"}', b'{"text": '], r"p.jsonl:2: no valid JSON"),
        ([b'{"text": "a"}', b"", b'{"text": "\xff"}'], r"p.jsonl:3: no UTF-8 text"),
        ([b'{"text": "a"}', b"[1]"], r"p.jsonl:2: expected a JSON object, got list"),
        ([b"null"], r"p.jsonl:1: expected a JSON object, got NoneType"),
        ([b'{"tex": "a"}'], r"p.jsonl:1: no prompt in the record; expected one of .*got .*tex"),
        ([b'{"turns": []}'], r"p.jsonl:1: turns must be a list of at least one text"),
        ([b'{"turns": "one"}'], r"p.jsonl:1: turns must be a list of at least one text"),
        ([b'{"turns": ["a", 3]}'], r"p.jsonl:1: turns: the prompt must be text that is not empty, got 3"),
        ([b'{"text": " "}'], r"p.jsonl:1: text: the prompt must be text that is not empty"),
        ([b'{"prompt": null}'], r"p.jsonl:1: prompt: the prompt must be text that is not empty, got None"),
        ([b'{"text": "\\ud800"}'], r"p.jsonl:1: text: the prompt is no valid Unicode \(surrogates"),
        ([b'{"text": "a", "category": 3}'], r"p.jsonl:1: category must be text that is not empty, got 3"),
        ([b'{"text": "a", "id": [1]}'], r"p.jsonl:1: the id must be text or a whole number, got \[1\]"),
        ([b'{"messages": {}}'], r"p.jsonl:1: messages must be a list of \{role, content\}, got \{\}"),
        ([b'{"conversations": [{"role": "user"}]}'], r"p.jsonl:1: conversations must be a list of"),
        ([b'{"conversations": [{"from": "human", "value": "x"}]}'], r"p.jsonl:1: conversations must be a list of"),
        ([b'{"messages": [{"role": "system", "content": "x"}]}'], r"no message of role 'user'"),
        (
            [b'{"messages": [{"role": "assistant", "content": "x"}]}'],
            r"messages\[0\].role must be user, .* 'assistant'",
        ),
        (
            [b'{"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]}'],
            r"messages\[1\].role must be user, .* got 'tool'",
        ),
        ([b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}'], "messages: the prompt must be text"),
        ([b'{"id": 1, "text": "a"}', b'{"id": "1", "text": "b"}'], r"p.jsonl:2: repeats the id '1' of line 1"),
        ([b""], "holds no record"),
    ],
)
def test_malformed_file_is_refused_with_its_line(tmp_path: Path, lines: list[bytes], message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message):
        load_workload(f"{tmp_path}/p.jsonl")


@pytest.mark.parametrize("spoil", [lambda data: b"no gzip", lambda data: data[:-9], lambda data: data[:20] + b"x" * 20])
def test_broken_gzip_is_refused(tmp_path: Path, spoil: Any) -> None:
    data = gzip.compress(b"".join(json.dumps({"text": f"t{i}"}).encode() + b"\n" for i in range(500)))
    (tmp_path / "p.jsonl.gz").write_bytes(spoil(data))
    with pytest.raises(ValueError, match=r"p.jsonl.gz:\d+: "):
        load_workload(f"{tmp_path}/p.jsonl.gz")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chat:10000", r"asks for 10000 prompts, but there are \d+"),
        ("chat:0", "must be at least 1"),
        ("caht:4", r"neither a known name \(chat, mt_bench"),
        ("mt_bench:four", "'four' is neither a known name"),
        ("chat:4,", "no workload ''"),
        ("", "no workload ''"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_workload(spec)


def test_published_set_is_read_from_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYSPEC_DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "test.jsonl", {"question": "q"})
    (found,) = load_workload("gsm8k")
    assert (found.turns, found.category) == (("q",), "gsm8k")


def test_published_set_is_read_as_a_hub_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real `datasets`, on a dataset folder instead of the hub's."""
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "test.jsonl", *({"question": f"q{i}", "answer": "4"} for i in range(5)))
    monkeypatch.delenv("RAYSPEC_DATA", raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    local = replace(PUBLISHED["gsm8k"], hub=HubDataset(path=str(tmp_path / "hub"), split="test"))
    monkeypatch.setitem(PUBLISHED, "gsm8k", local)
    from_hub = load_workload("gsm8k:3", seed=2)
    assert from_hub == load_workload(f"gsm8k:{tmp_path}/hub/test.jsonl:3", seed=2)
    write(tmp_path / "hub" / "test.jsonl", {"question": "q"}, {"question": ""})
    with pytest.raises(ValueError, match=r"hub \(split test\):2: question: the prompt must be text that is not empty"):
        load_workload("gsm8k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gsm8k",
            "could not be loaded from the Hugging Face hub: .*RAYSPEC_DATA is not set. Get test.jsonl from https",
        ),
        (
            "spec_bench",
            "is on no hub; and RAYSPEC_DATA is not set. Get question.jsonl from https://github.com/hemingkx",
        ),
    ],
)
def test_offline_says_what_to_get_and_where_to_put_it(name: str, message: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "RAYSPEC_DATA"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = (
        "from rayspec.workloads import load_workload\n"
        f"try: load_workload('{name}:4')\nexcept ValueError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert re.search(message, out.stdout), out.stdout
    assert f"workload={name}:/path/to/" in out.stdout


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "categories", "turns"),
    [
        ("mt_bench", 80, 8, 2),
        ("humaneval", 164, 1, 1),
        ("gsm8k", 1319, 1, 1),
        ("spec_bench", 480, 6, 2),
    ],
)
def test_the_published_sets_are_whole(name: str, count: int, categories: int, turns: int) -> None:
    found = load_workload(name)
    assert len(found) == count
    assert len({c.category for c in found}) == categories
    assert max(len(c.turns) for c in found) == turns
    if name == "spec_bench":
        assert set(Counter(c.category for c in found).values()) == {80}
