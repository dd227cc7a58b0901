"""SPEED-Bench in the two layouts that NVIDIA's scripts leave, made by hand: nothing of the benchmark is here."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from fixture_models import DRAFTERS, TARGET
from test_load import ScriptedEngine, load

from rayspec.metrics import category_key, tau_by_category
from rayspec.sweep.config import EngineConfig, SweepConfig
from rayspec.sweep.plan.prepare import prepare
from rayspec.training.data.answers import AnswersConfig
from rayspec.training.data.prompts import check_source
from rayspec.workloads import load_workload
from rayspec.workloads.prompt_hashes import evaluation_hashes, prompt_hash

DOMAINS = ("coding", "math", "humanities", "stem", "writing", "summarization", "roleplay", "rag", "multilingual",
           "reasoning", "qa")  # fmt: skip
BLANK = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def rows(split: str) -> list[dict[str, Any]]:
    """With the columns of the dataset card. Of the qualitative split every third conversation has two turns."""
    is_qualitative = split == "qualitative"
    categories = DOMAINS if is_qualitative else ("low_entropy", "mixed", "high_entropy")
    words = 1 if is_qualitative else 1000 * int(split.removeprefix("throughput_").removesuffix("k"))
    found = []
    for i in range(2 * len(categories)):
        turns = [f"Question {i}?" if is_qualitative else "word " * words]
        turns += [f"And then, {i}?"] if is_qualitative and i % 3 == 0 else []
        own = {"category": categories[i % len(categories)], "sub_category": "other", "turns": turns}
        about = {"source": "by hand", "src_id": f"row_{i}", "difficulty": "", "multiturn": len(turns) > 1}
        found.append({"question_id": f"{split}-{i}", **own, **about})
    return found


def as_jsonl(folder: Path, split: str, records: list[dict[str, Any]]) -> Path:
    """What NeMo-Skills' prepare.py leaves: messages in place of turns."""
    file = folder / "speed_bench" / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for record in records:
        messages = [{"role": "user", "content": turn} for turn in record["turns"]]
        lines.append(json.dumps({**{k: v for k, v in record.items() if k != "turns"}, "messages": messages}))
    file.write_text("\n".join(lines) + "\n")
    return file


def as_parquet(folder: Path, split: str, records: list[dict[str, Any]], place: str = "speed_bench") -> Path:
    """What Model-Optimizer's prepare_data.py leaves, by default under `speed`."""
    file = folder / place / split / "test.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(records).to_parquet(file)
    return file


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RAYSPEC_DATA", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, lambda *given: as_parquet(*given, place="speed")])
def test_both_layouts_are_the_same_conversations(write: Any, data: Path) -> None:
    file = write(data, "qualitative", rows("qualitative"))
    found = load_workload("speed_bench_qualitative")
    by_id = {c.id: c for c in found}
    assert {r["question_id"]: (r["category"], tuple(r["turns"])) for r in rows("qualitative")} == {
        id_: (c.category, c.turns) for id_, c in by_id.items()
    }
    assert set(Counter(c.category for c in found).values()) == {2}
    assert load_workload(f"speed_bench_qualitative:{file}") == found
    assert {c.turns for c in load_workload(str(file))} == {c.turns for c in found}
    assert {c.category for c in load_workload("speed_bench_qualitative:2:rag")} == {"rag"}


def test_acceptance_is_told_by_domain(data: Path) -> None:
    as_jsonl(data, "qualitative", rows("qualitative"))
    found = load_workload("speed_bench_qualitative")
    _, records = asyncio.run(asyncio.wait_for(_answered(found), 20))
    assert {category_key(c) for c in tau_by_category(records)} == {f"tau_category/{domain}" for domain in DOMAINS}
    assert sum(r.turn == 1 for r in records) == sum(len(c.turns) == 2 for c in found) > 0


async def _answered(found: Any) -> Any:
    from rayspec.farm.load import run_load

    return await run_load(ScriptedEngine(seconds=0.001), load(*found))


@pytest.mark.parametrize("write", [as_jsonl, as_parquet])
def test_blanks_are_counted_and_refused(write: Any, data: Path) -> None:
    records = rows("throughput_1k")
    for i in (2, 4):
        records[i]["turns"] = [f"{BLANK}\n\nmore"]
    write(data, "throughput_1k", records)
    message = r"2 of 6 conversations, the first of them throughput_1k-2, hold no text .* python prepare.py --config thr"
    with pytest.raises(ValueError, match=message):
        load_workload("speed_bench_throughput_1k:1")
    assert prompt_hash(records[0]["turns"][0]) in evaluation_hashes()  # training goes on, and keeps its hands off


def test_what_lacks_is_said_with_the_script_that_makes_it(data: Path) -> None:
    with pytest.raises(ValueError, match="is on the hub without its texts") as error:
        load_workload("speed_bench_throughput_8k:4")
    said = str(error.value)
    assert "prepare.py --config throughput_8k" in said
    assert "put it at $RAYSPEC_DATA/speed_bench/throughput_8k.jsonl" in said


def test_nothing_is_trained_on_it() -> None:
    with pytest.raises(ValueError, match="speed_bench_qualitative is for evaluation"):
        check_source(AnswersConfig(prompts="speed_bench_qualitative:8"), "answers")


def plan(workload: str, context_length: int) -> Any:
    engine = EngineConfig(context_length=context_length)
    drafters = [str(DRAFTERS["full"])]
    return prepare(SweepConfig(target=str(TARGET), drafters=drafters, workload=workload, engine=engine))


def test_a_long_split_is_refused_where_the_context_is_short(data: Path) -> None:
    as_jsonl(data, "throughput_1k", rows("throughput_1k"))
    as_jsonl(data, "qualitative", rows("qualitative"))
    message = (
        r"6 of 6 prompts of .*throughput_1k' do not fit, the longest of them throughput_1k-.* but 512 \(engine.con"
    )
    with pytest.raises(ValueError, match=message):
        plan("speed_bench_throughput_1k", 512)
    with pytest.raises(ValueError, match=r"6 of 28 prompts .* do not fit, .*; long_prompts=drop leaves them out"):
        plan("speed_bench_throughput_1k, speed_bench_qualitative", 512)
    assert len(plan("speed_bench_qualitative", 512).prompts) == 22


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"a\.parquet: no parquet file that can be read"):
        load_workload(f"{tmp_path}/a.parquet")
    pd.DataFrame([{"turns": ["fine"]}, {"turns": []}]).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet:2: turns must be a list of at least one text"):
        load_workload(f"{tmp_path}/b.parquet:1")
