"""Files that are not what they are given for: configs, prompts. Each is refused by its name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hostile import JOBS, Case, ask, base, complaints, one
from small_world import World

pytestmark = pytest.mark.usefixtures("untouched_home")


CONFIG_FILES: dict[str, bytes] = {
    "number": b"42",
    "text": b"hello",
    "yes": b"true",
    "list": b"- a",
    "set": b"!!set {name}",
    "not_utf8": "name: é".encode("latin1"),
    "utf16": "name: x".encode("utf16"),
    "zero_byte": b"name: \0",
    "bytes": bytes(range(256)),
    "gzip": gzip.compress(b"name: x"),
    "deep": b"name: " + b"[" * 20_000,
    "deep_and_closed": b"name: {a: " + b"[" * 5000 + b"]" * 5000 + b"}",
    "digits": b"seed: " + b"9" * 5000,
    "python_object": b"name: !!python/object/apply:os.system ['true']",
    "date": b"name: !!timestamp 2020-01-01",
    "twice": b"name: a\nname: b",
    "two_documents": b"name: a\n---\nname: b",
    "number_as_key": b"1: 2",
    "null_as_key": b"null: 2",
    "list_as_key": b"[1]: 2",
    "alias_of_itself": b"name: &a [*a]",
    "tab": b"\tname: x",
    "unclosed": b"name: [",
    "unknown_key": b"nmae: x",
    "missing": b"name: ???",
    "interpolation": b"name: ${nowhere}",
    "interpolation_of_itself": b"name: ${name}",
}


@pytest.mark.parametrize("job", JOBS)
def test_config_files_that_are_none(job: str, world: World, place: Path) -> None:
    arguments = [a for a in base(job, world, place) if a != "--config" and not a.endswith(".yaml")]
    files = [place / f"{name}.bad" for name in CONFIG_FILES]
    for file in files:
        file.write_bytes(CONFIG_FILES[file.stem])
    places = [place, place / "none.yaml", place / ("x" * 300), Path("/dev/null"), Path("/proc/self/mem")]
    cases = [(["--config", str(file)], (str(file)[:200],)) for file in (*files, *places)]
    found = complaints(job, arguments, cases)
    lines = [(list(line), words) for line, words in COMMAND_LINES]
    found += complaints(job, base(job, world, place), lines)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


COMMAND_LINES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--nonsense",), ("--nonsense",)),
    (("--plan=yes",), ("--plan",)),
    (("--config",), ("--config",)),
    (("name",), ("expected key=value",)),
    (("=x",), ("expected key=value",)),
    (("-x=1",), ("-x",)),
    (("nonsense=1",), ("unknown key 'nonsense'",)),
    (("nonsense.below=1",), ("unknown key 'nonsense'",)),
    (("a..b=1",), ("unknown key",)),
    ((".=1",), ("unknown key",)),
    (("name=[1",), ("no valid YAML",)),
    (("name=!!python/object/apply:os.system [x]",), ("no valid YAML",)),
    (("x=" + "[" * 5000 + "]" * 5000,), ("nested too deep",)),
    (("x=" + "9" * 5000,), ("4300 digits",)),
)


PROMPTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n",
    "no_json": b"{'turns': ['a']}\n",
    "cut": b'{"prompt": "a"',
    "number": b"3\n",
    "null": b"null\n",
    "list": b"[1]\n",
    "text": b'"a"\n',
    "no_prompt": b'{"promt": "a"}\n',
    "many_keys": json.dumps({f"key{i}" * 50: 1 for i in range(99)}).encode(),
    "prompt_is_null": b'{"prompt": null}\n',
    "prompt_is_number": b'{"prompt": 3}\n',
    "prompt_is_blank": b'{"prompt": " "}\n',
    "half_a_pair": b'{"prompt": "\\ud800"}\n',
    "turns_is_text": b'{"turns": "a"}\n',
    "turns_is_empty": b'{"turns": []}\n',
    "turns_is_object": b'{"turns": {"a": "b"}}\n',
    "turn_is_list": b'{"turns": [["a"]]}\n',
    "messages_is_text": b'{"messages": "a"}\n',
    "message_is_text": b'{"messages": ["a"]}\n',
    "message_without_content": b'{"messages": [{"role": "user"}]}\n',
    "content_is_null": b'{"messages": [{"role": "user", "content": null}]}\n',
    "role_is_list": b'{"messages": [{"role": ["user"], "content": "a"}]}\n',
    "unknown_role": b'{"messages": [{"role": "tool", "content": "a"}]}\n',
    "answer_first": b'{"messages": [{"role": "assistant", "content": "a"}]}\n',
    "no_user": b'{"messages": [{"role": "system", "content": "a"}]}\n',
    "id_is_list": b'{"id": [1], "prompt": "a"}\n',
    "id_is_null": b'{"id": null, "prompt": "a"}\n',
    "id_is_true": b'{"id": true, "prompt": "a"}\n',
    "id_is_empty": b'{"id": "", "prompt": "a"}\n',
    "id_has_a_newline": b'{"id": "a\\nb", "prompt": "a"}\n',
    "id_is_long": b'{"id": "' + b"x" * 5000 + b'", "prompt": "a"}\n',
    "id_of_5000_digits": b'{"id": ' + b"9" * 5000 + b', "prompt": "a"}\n',
    "id_of_4000_digits": b'{"id": ' + b"9" * 4000 + b', "prompt": "a"}\n',
    "id_is_float": b'{"id": 1.5, "prompt": "a"}\n',
    "id_is_nan": b'{"id": NaN, "prompt": "a"}\n',
    "repeated_id": b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n',
    "category_is_number": b'{"category": 3, "prompt": "a"}\n',
    "category_is_empty": b'{"category": "", "prompt": "a"}\n',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"\n",
    "deep_object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    "latin1": '{"prompt": "é"}\n'.encode("latin1"),
    "utf16": '{"prompt": "a"}\n'.encode("utf16"),
    "zero_bytes": b"\0" * 100,
    "gzip_without_its_ending": gzip.compress(b'{"prompt": "a"}\n'),
    "one_that_does_not_fit": json.dumps({"prompt": "a" * 200}).encode(),
    "a_second_turn_that_does_not_fit": json.dumps({"turns": ["a" * 60, "b" * 60]}).encode(),
}


def test_prompts_files_that_are_none(world: World, place: Path) -> None:
    cases: list[Case] = []
    for name, content in PROMPTS.items():
        (place / f"{name}.jsonl").write_bytes(content)
        cases.append(one(f"workload={place}/{name}.jsonl", f"{name}"))
    (place / "plain.jsonl.gz").write_bytes(b'{"prompt": "a"}\n')
    (place / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:20])
    cases += [one(f"workload={place}/{name}.jsonl.gz", name) for name in ("plain", "cut")]
    found = complaints("sweep", base("sweep", world, place), cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def test_prompts_that_do_not_fit_are_dropped_where_asked(world: World, place: Path) -> None:
    lines = [json.dumps({"id": i, "prompt": "a" * (200 if i % 2 else 20)}) for i in range(8)]
    (place / "some.jsonl").write_text("\n".join(lines))
    arguments = [*base("sweep", world, place), f"workload={place}/some.jsonl"]
    refused = ask("sweep", *arguments)
    assert "4 of 8 prompts of workload" in refused.err
    assert "long_prompts=drop leaves them out" in refused.err
    answer = ask("sweep", *arguments, "long_prompts=drop")
    assert answer.code == 0, answer
    assert "4 prompts are too long and left out" in answer.out
    assert "Every trial answers 4 prompts" in answer.out


def test_streams_that_a_block_cannot_fill_earn_a_warning(world: World, place: Path) -> None:
    answer = ask("sweep", *base("sweep", world, place), "concurrency=[1,5,8]")
    assert answer.code == 0, answer
    assert "warning: concurrency [5, 8], but a block has 4 prompts" in answer.out
    assert (
        "warning: concurrency"
        not in ask("sweep", *base("sweep", world, place), "concurrency=[1,8]", "block_prompts=8").out
    )


def test_an_argument_that_no_champion_may_bring_earns_a_warning(world: World, place: Path) -> None:
    answer = ask("sweep", *base("sweep", world, place), "engine.extra={skip_tokenizer_init: true, page_size: 1}")
    assert answer.code == 0, answer
    assert "warning: engine.extra has skip_tokenizer_init, no setting of speed" in answer.out
    assert "warning: engine.extra" not in ask("sweep", *base("sweep", world, place), "engine.extra.page_size=1").out


# --- folders of others
