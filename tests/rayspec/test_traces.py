"""Traces as traffic: how they are read, what is refused with its line, and what is sent when."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from fixture_models import DRAFTERS, PROMPTS, TARGET
from test_load import CHATML, ScriptedEngine
from transformers import PreTrainedTokenizerFast

from rayspec.config import load_config, to_yaml
from rayspec.farm.load import Load, Traffic, run_load
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.prepare import Prepared, prepare
from rayspec.sweep.plan.traces import Cutter
from rayspec.sweep.trace import TraceConfig
from rayspec.workloads import Conversation, load_workload
from rayspec.workloads.traces import TracedRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,48,10
2023-11-16 18:17:04.0319600,31,27
2023-11-16 18:17:06.0319600,7,5
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 48, "output_length": 10, "hash_ids": [46, 47]},
    {"timestamp": 0, "input_length": 31, "output_length": 27, "hash_ids": [46]},
    {"timestamp": 3052, "input_length": 7, "output_length": 5, "hash_ids": [9]},
]
BODY: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a city."}],
}


def write(file: Path, *records: Any) -> Path:
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def text(folder: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def planned(file: Path, **fields: Any) -> Prepared:
    trace = {name: fields.pop(name) for name in ("unit", "speed", "start_s", "duration_s") if name in fields}
    base: dict[str, Any] = {
        "target": str(TARGET),
        "drafters": [str(DRAFTERS["full"])],
        "workload": f"{PROMPTS}:3",
        "concurrency": [],
        "block_prompts": 2,
    }
    return prepare(SweepConfig(trace=TraceConfig(path=str(file), **trace), **(base | fields)))


def rows(file: Path, **options: Any) -> list[tuple[int, float, int | None, int | None]]:
    return [(r.line, round(r.at_s, 6), r.input_tokens, r.output_tokens) for r in read_trace(file, **options)]


def test_azure_s_dates_have_seven_digits(tmp_path: Path) -> None:
    assert rows(text(tmp_path, AZURE)) == [(2, 0.0, 48, 10), (3, 0.052, 31, 27), (4, 2.052, 7, 5)]


@pytest.mark.parametrize("packed", [False, True])
def test_mooncake_s_numbers_are_milliseconds(tmp_path: Path, packed: bool) -> None:
    file = write(tmp_path / "trace.jsonl", *MOONCAKE)
    if packed:
        (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file = tmp_path / "trace.jsonl.gz"
    assert rows(file, unit="ms") == [(1, 0.0, 48, 10), (2, 0.0, 31, 27), (3, 3.052, 7, 5)]
    assert rows(file, unit="s")[2][1] == 3052


def test_burstgpt_s_columns_and_a_packed_csv(tmp_path: Path) -> None:
    """It has other columns between those that are read; a byte order mark and blank lines are no matter."""
    header = "\ufeffTimestamp,Model,Request tokens,Response tokens,Total tokens\r\n"
    content = header + "5,GPT-4,472,18,490\r\n\r\n45,ChatGPT,20,3,23\r\n"
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(content.encode()))
    assert rows(tmp_path / "t.csv.gz", unit="s") == [(2, 0.0, 472, 18), (4, 40.0, 20, 3)]


def test_a_log_of_request_bodies(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "two."}]
    file = write(
        tmp_path / "log.jsonl",
        {"timestamp": "2026-01-01T00:00:00Z", **BODY, "max_tokens": 9},
        {"timestamp": "2026-01-01T01:00:01+01:00", "body": {**BODY, "max_completion_tokens": 8, "max_tokens": 9}},
        {"timestamp": "2026-01-01T00:00:02Z", "output_length": 4, "category": "chat", "body": BODY | {"max_tokens": 9}},
        {"created": "2026-01-01T00:00:02Z", "messages": [{"role": "user", "content": parts}]},
    )
    found = read_trace(file)
    assert [(r.at_s, r.output_tokens, r.category) for r in found] == [
        (0.0, 9, "trace"), (1.0, 8, "trace"), (2.0, 4, "chat"), (2.0, None, "trace")
    ]  # fmt: skip
    assert found[0].messages == tuple(BODY["messages"])
    assert found[3].messages == ({"role": "user", "content": "Name two."},)


def test_a_part_of_a_trace_begins_at_its_own_first_request(tmp_path: Path) -> None:
    file = text(tmp_path, "timestamp,input_length,output_length\n" + "".join(f"{10 + i},5,5\n" for i in range(10)))
    assert rows(file, unit="s", start_s=3.0, duration_s=2.0) == [(5, 0.0, 5, 5), (6, 1.0, 5, 5)]
    with pytest.raises(ValueError, match=r"within trace.start_s=90; it was read up to 9 s after its first"):
        read_trace(file, "s", start_s=90.0)
    file.write_text(file.read_text() + "nonsense,5,5\n")  # behind the part, so nobody reads it
    assert len(read_trace(file, "s", start_s=3.0, duration_s=2.0)) == 2


HEADER = "timestamp,input_length,output_length\n"
BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "holds no request; give a file with at least one"),
    "a header alone": (HEADER, "holds no request"),
    "blank": ("\n\n", "holds no request"),
    "backwards": (HEADER + "5,1,1\n9,1,1\n8.5,1,1\n", r":4: the timestamp comes 0.5 s before that of line 3;.*sort"),
    "no time": (HEADER + "5,1,1\nyesterday,1,1\n", r":3: the timestamp 'yesterday' is neither a number nor a date"),
    "a missing time": (HEADER + ",1,1\n", r":2: no timestamp or created"),
    "not a number": (HEADER + "nan,1,1\n", r":2: the timestamp must be a finite number"),
    "a date beside a unit": (HEADER + "2023-11-16,1,1\n", r":2: .* is a date, but trace.unit is s; leave"),
    "nothing asked": (HEADER + "5,0,1\n", r":2: input_length must be a whole number in 1\.\..*, got '0'"),
    "nothing answered": (HEADER + "5,1,0\n", r":2: output_length must be .* got '0'; leave requests out that failed"),
    "half a token": (HEADER + "5,1.5,1\n", r":2: input_length must be a whole number .* got '1.5'"),
    "a missing length": (HEADER + "5,1,\n", r":2: expected input_length and output_length"),
    "a short row": (HEADER + "5,1\n", r":2: 2 cells, but the header names 3"),
    "no header": ("5,1,1\n", r":1: no column timestamp \(in any case\) in 5, 1, 1; the first line"),
    "other columns": ("timestamp,prompt,output_length\n1,2,3\n", r":1: no column input_length or contexttokens"),
    "no text": (HEADER.encode() + b"5,\xff,1\n", "no UTF-8 text"),
    "an open quote": (HEADER + '"5,1,1\n', r":2: no valid CSV"),
    "no json": ('{"timestamp": 1,\n', r":1: no valid JSON"),
    "a list": ('{"timestamp": 1, "input_length": 2, "output_length": 2}\n[1]\n', r":2: expected a JSON object"),
    "true": ('{"timestamp": true, "input_length": 2, "output_length": 2}\n', r":1: the timestamp must be a number"),
    "a fraction": ('{"timestamp": 1, "input_length": 2.0, "output_length": 2}\n', r":1: input_length must be a whole"),
    "both kinds": (
        json.dumps({"timestamp": 1, **BODY}) + '\n{"timestamp": 2, "input_length": 2, "output_length": 2}\n',
        r":2: it has lengths, and line 1 has not; a trace says either",
    ),
    "tools": (json.dumps({"timestamp": 1, **BODY, "tools": [{"type": "function"}]}), r":1: the request offers tools"),
    "a picture": (
        json.dumps({"timestamp": 1, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        r":1: messages\[0\].content must be text, .*leave such requests out",
    ),
    "a tool's word": (json.dumps({"timestamp": 1, "messages": [{"role": "tool", "content": "x"}]}), "must be one of"),
    "half a letter": ('{"timestamp": 1, "messages": [{"role": "user", "content": "\\ud800"}]}', "no valid Unicode"),
    "no messages": (json.dumps({"timestamp": 1, "messages": []}), "messages must be a list of at least one"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_with_its_line(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        read_trace(text(tmp_path, content), "s")
    assert str(tmp_path / "trace.csv") in str(error.value)


def test_numbers_need_a_unit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace.csv:2: the timestamp '5' is a number, .* set trace.unit=ms .* or"):
        read_trace(text(tmp_path, HEADER + "5,1,1\n"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trace.path=x", "trace.sped=[2]"], "unknown key 'trace.sped'; known under trace: path, speed, unit"),
        (["trace.speed=[2]"], "trace.path must name a CSV or JSONL file, got nothing"),
        (["trace.path=x", "trace.speed=[]"], r"trace.speed must be a list of factors in .*, got \[\]"),
        (["trace.path=x", "trace.speed=[1,0]"], r"trace.speed must be .* got \[1.0, 0.0\]"),
        (["trace.path=x", "trace.speed=[1,1.0000001]"], "trace.speed must be different in their first six digits"),
        (["trace.path=x", "trace.unit=us"], "trace.unit must be one of s, ms, or absent for dates, got 'us'"),
        (["trace.path=x", "trace.start_s=-1"], "trace.start_s must be in 0.., got -1"),
        (["trace.path=x", "trace.duration_s=0"], "trace.duration_s must be above 0"),
        (["trace.path=x", "concurrency=[0]"], "concurrency must be at least 1"),
        (["workload=trace"], "workload=trace sends what a trace says, but there is none; name its file in trace.path"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("..,", r"\.\.1e\+09,")):
        load_config(SweepConfig, None, settings)


def test_a_trace_is_settings_like_all_others(tmp_path: Path) -> None:
    config = load_config(SweepConfig, None, ["trace.path=a.csv", "trace.speed=[1,4]", "concurrency=[2]"])
    assert [t.label for t in config.traffic()] == ["c2", "x1", "x4"]
    (tmp_path / "stored.yaml").write_text(to_yaml(config))
    assert load_config(SweepConfig, tmp_path / "stored.yaml") == config


def test_lengths_become_prompts_of_the_workload(tmp_path: Path) -> None:
    prepared = planned(text(tmp_path, AZURE), speed=[1.0, 2.0], max_new_tokens=64)
    found = prepared.prompts
    assert all(isinstance(p, TracedRequest) for p in found)
    assert [(len(p.input_ids), p.output_tokens) for p in found] == [(48, 10), (31, 27), (7, 5)]  # type: ignore[attr-defined]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    texts = [c.turns[0] for c in load_workload(f"{PROMPTS}:3", 0)]
    for request, said in zip(found, texts, strict=True):
        whole = "\n\n".join([said, *texts, *texts])
        assert whole.startswith(tokenizer.decode(request.input_ids)[:20])  # type: ignore[attr-defined]
    described = prepared.describe()
    assert "3 requests within 2.1 s, 0.975 a second; prompts of 29 tokens in the mean, at most 48" in described
    assert "answers of 14, at most 27, or shorter where the target ends them" in described
    assert "| full-s4-x2 " in described
    assert "up to 42 tokens in its cohort" in described
    assert [t.traffic.label for t in prepared.plan.trials] == ["x1", "x2", "x1", "x2"]


def test_no_two_requests_begin_alike() -> None:
    """Else the prefix cache would answer for the engine. Long ones go round, and round again."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    cutter = Cutter(load_workload(f"{PROMPTS}:4", 0), tokenizer, is_chat=True)
    length = 3 * len(cutter.row[0]) + 5
    made = [cutter.ids(i, length) for i in range(12)]
    assert {len(ids) for ids in made} == {length}
    assert len({ids[:8] for ids in made}) == 12
    assert len(set(made[0])) > 20


def test_the_template_frames_what_is_cut() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    tokenizer.chat_template = CHATML
    texts = [Conversation(id="a", category="c", turns=("one two three four five",))]
    cutter = Cutter(texts, tokenizer, is_chat=True)
    said = tokenizer.decode(cutter.ids(0, cutter.shortest + 9))
    assert said.startswith("<|user|>one two")
    assert said.endswith("\n<|assistant|>")
    assert Cutter(texts, tokenizer, is_chat=False).shortest == 1


def test_what_was_asked_is_sent_as_it_was(tmp_path: Path) -> None:
    said = [*BODY["messages"], {"role": "assistant", "content": "Bonn."}, {"role": "user", "content": "Another."}]
    file = write(tmp_path / "log.jsonl", {"timestamp": 3, "messages": said}, {"timestamp": 4, **BODY, "max_tokens": 9})
    prepared = planned(file, workload="trace", unit="s", max_new_tokens=20)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    first, second = prepared.prompts
    assert isinstance(first, TracedRequest)
    assert tokenizer.decode(first.input_ids) == "Be brief.\n\nName a city.\n\nBonn.\n\nAnother."
    assert (first.output_tokens, second.output_tokens, second.arrival_s) == (None, 9, 1.0)  # type: ignore[attr-defined]
    assert "answers of 14, at most 20" in prepared.describe()


def test_workload_and_trace_must_agree(tmp_path: Path) -> None:
    lengths = text(tmp_path, AZURE)
    with pytest.raises(
        ValueError, match="says lengths alone, so that workload=trace has nothing to send; name in work"
    ):
        planned(lengths, workload="trace")
    log = write(tmp_path / "log.jsonl", {"timestamp": 3, **BODY})
    with pytest.raises(ValueError, match=r"says what was asked, .* but workload is .*; set workload=trace"):
        planned(log, unit="s")
    with pytest.raises(ValueError, match=r"the trace /nowhere\.csv cannot be read"):
        planned(Path("/nowhere.csv"))


def test_requests_that_do_not_fit_are_counted_and_the_longest_is_named(tmp_path: Path) -> None:
    file = text(tmp_path, HEADER + "1,100,20\n2,300,20\n3,30,400\n4,20,20\n")
    message = (
        r"2 of 4 requests of trace .*trace.csv do not fit, the longest of them line-4: up to 30 tokens, .* and 400 new "
        r"ones, but 256 \(engine.context_length, .*\) less 5 for the draft leave 251; raise .*; long_prompts=drop"
    )
    with pytest.raises(ValueError, match=message):
        planned(file, unit="s", engine=engine(256))
    kept = planned(file, unit="s", engine=engine(256), long_prompts="drop")
    assert ([p.id for p in kept.prompts], kept.dropped) == (["line-2", "line-5"], 2)
    assert "2 prompts are too long and left out." in kept.describe()
    with pytest.raises(ValueError, match="4 of 4 requests") as none_left:
        planned(file, unit="s", engine=engine(32), long_prompts="drop")
    assert "long_prompts" not in str(none_left.value)


def engine(context_length: int, **fields: Any) -> Any:
    from rayspec.sweep.config import EngineConfig

    return EngineConfig(context_length=context_length, **fields)


def test_a_part_that_is_too_large_is_refused_before_it_is_made(tmp_path: Path) -> None:
    file = text(tmp_path, HEADER + "".join(f"{i},400,2\n" for i in range(3)))
    from rayspec.sweep.plan import traces

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "MAX_PROMPT_TOKENS", 1000)
        with pytest.raises(
            ValueError, match="3 requests of 1200 prompt tokens in all, at most 1000; take a part of it"
        ):
            planned(file, unit="s")


def test_a_block_may_not_last_longer_than_its_time(tmp_path: Path) -> None:
    file = text(tmp_path, HEADER + "0,5,5\n1,5,5\n2,5,5\n100,5,5\n")
    with pytest.raises(
        ValueError, match=r"requests of line-4 to line-5 of the trace come within 98 s at trace.speed=1,"
    ):
        planned(file, unit="s", engine=engine(256, block_timeout_s=60.0))
    planned(file, unit="s", speed=[2.0], engine=engine(256, block_timeout_s=60.0))


def traced(id_: str, at_s: float, output: int | None) -> TracedRequest:
    return TracedRequest(
        id=id_, category="c", turns=("",), input_ids=(1, 2, int(id_)), arrival_s=at_s, output_tokens=output
    )


class RecordingEngine(ScriptedEngine):
    """Remembers how long answers may be, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    async def async_generate(self, *, sampling_params: dict[str, Any], stream: bool, **request: Any) -> Any:
        self.lengths.append(sampling_params["max_new_tokens"])
        return await super().async_generate(sampling_params=sampling_params, stream=stream, **request)


def test_a_block_is_replayed_at_its_times_and_lengths() -> None:
    block = Load(
        prompts=(traced("3", 10.0, 7), traced("4", 10.2, None), traced("5", 10.6, 2)),
        traffic=Traffic(trace_speed=2.0), max_new_tokens=64, temperature=0.0, ignore_eos=True,
    )  # fmt: skip
    assert block.arrivals_s() == pytest.approx([0.0, 0.1, 0.3])
    engine = RecordingEngine()
    wall_s, records = asyncio.run(run_load(engine, block))
    assert engine.asked == [{"input_ids": [1, 2, i]} for i in (3, 4, 5)]
    assert engine.lengths == [7, 64, 2]
    waited = [at - engine.asked_at[0] for at in engine.asked_at]
    assert waited[1] == pytest.approx(0.1, abs=0.05)
    assert waited[2] == pytest.approx(0.3, abs=0.05)
    assert wall_s >= 0.3
    assert [r.prompt_id for r in records] == ["3", "4", "5"]


def test_a_warm_up_has_its_own_length() -> None:
    engine = RecordingEngine()
    block = Load(
        prompts=(traced("3", 0.0, 700),), traffic=Traffic(concurrency=1), max_new_tokens=8, temperature=0.0,
        ignore_eos=False, has_own_lengths=False,
    )  # fmt: skip
    asyncio.run(run_load(engine, block))
    assert engine.lengths == [8]


def test_traces_come_last_and_are_named() -> None:
    kinds = [Traffic(trace_speed=0.5), Traffic(request_rate=2.5), Traffic(concurrency=16)]
    assert [t.label for t in sorted(kinds)] == ["c16", "r2.5", "x0.5"]
    assert str(kinds[0]) == "the trace at 0.5x"
    assert kinds[0].is_open
