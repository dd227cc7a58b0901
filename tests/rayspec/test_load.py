"""The load generator against a scripted engine: who is asked what, when, and how it is counted."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fixture_models import TARGET
from scipy import stats
from transformers import PreTrainedTokenizerFast

from rayspec.farm.chat import turn_request
from rayspec.farm.load import Load, RequestFailed, Traffic, run_load
from rayspec.workloads import Conversation

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TICK_S = 0.005  # an event loop's timers count from when it last looked at the clock, so that they end a little early
REFUSES = "{{ raise_exception('no system message, please') }}"


class ScriptedEngine:
    """Streams two chunks a request; remembers what it was asked, when, and how many requests ran at once."""

    def __init__(self, reason: str = "length", seconds: float = 0.01) -> None:
        self.reason = reason
        self.seconds = seconds
        self.running = self.most = 0
        self.asked: list[dict[str, Any]] = []
        self.asked_at: list[float] = []

    async def async_generate(
        self, *, sampling_params: dict[str, Any], stream: bool, **request: Any
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(request)
        self.asked_at.append(time.perf_counter())
        answer = f"<answer {len(self.asked)}>"

        async def chunks() -> AsyncIterator[dict[str, Any]]:
            self.running += 1
            self.most = max(self.most, self.running)
            meta: dict[str, Any] = {"finish_reason": None, "prompt_tokens": 1}
            yield {"output_ids": [1], "text": "<", "meta_info": meta}
            await asyncio.sleep(self.seconds)
            self.running -= 1
            spec = {"spec_verify_ct": 1, "spec_num_correct_drafts": 1, "spec_correct_drafts_histogram": [0, 1]}
            done = {"finish_reason": {"type": self.reason, "message": "too long"}}
            yield {"output_ids": [1, 2, 3], "text": answer, "meta_info": {**meta, **done, **spec}}

        return chunks()


def conversation(id_: str, *turns: str, **fields: Any) -> Conversation:
    return Conversation(id=id_, category="c", turns=turns, **fields)


def load(*conversations: Conversation, **fields: Any) -> Load:
    defaults: dict[str, Any] = {"traffic": Traffic(concurrency=1), "max_new_tokens": 3, "temperature": 0.0}
    return Load(prompts=conversations, ignore_eos=False, **{**defaults, **fields})


def prompts(count: int) -> list[Conversation]:
    return [conversation(str(i), "x" * (i + 1)) for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(TARGET)


@pytest.mark.parametrize(("count", "concurrency", "most"), [(5, 1, 1), (5, 3, 3), (2, 4, 2)])
def test_closed_loop_keeps_as_many_streams_as_asked(count: int, concurrency: int, most: int) -> None:
    engine = ScriptedEngine()
    wall_s, records = asyncio.run(run_load(engine, load(*prompts(count), traffic=Traffic(concurrency=concurrency))))
    assert engine.most == most
    assert [r.prompt_id for r in records] == [str(i) for i in range(count)]
    assert all(0 < r.ttft_s < r.e2e_s <= wall_s for r in records)
    assert [(r.output_ids, r.verify_steps, r.accepted_histogram) for r in records] == [((1, 2, 3), 1, (0, 1))] * count
    assert all(len(r.chunk_gaps_s) == 1 for r in records)


def test_an_aborted_request_fails_the_block_with_the_message() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run_load(ScriptedEngine("abort"), load(*prompts(2))))
    assert caught.group_contains(RequestFailed, match="prompt 0: ended with abort: too long")


@pytest.mark.parametrize("traffic", [Traffic(concurrency=1), Traffic(concurrency=2), Traffic(request_rate=1000)])
def test_a_later_turn_holds_the_answer_to_the_one_before(traffic: Traffic) -> None:
    engine = ScriptedEngine()
    said = [conversation("a", "A1", "A2", "A3"), conversation("b", "B1")]
    _, records = asyncio.run(run_load(engine, load(*said, traffic=traffic)))
    assert [(r.prompt_id, r.turn) for r in records] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    asked = [request["prompt"] for request in engine.asked]
    number = {prompt: i + 1 for i, prompt in enumerate(asked)}  # of the answer to a prompt
    second = f"A1<answer {number['A1']}>\n\nA2"
    assert second in asked
    assert f"{second}<answer {number[second]}>\n\nA3" in asked
    assert number["A1"] < number[second]


def test_times_of_a_later_turn_start_when_the_answer_before_it_is_complete() -> None:
    engine = ScriptedEngine(seconds=0.05)
    _, (first, second) = asyncio.run(run_load(engine, load(conversation("a", "A1", "A2"))))
    assert first.e2e_s >= 0.05 - TICK_S
    assert second.ttft_s < first.e2e_s


def test_open_loop_does_not_wait_for_answers_and_follows_the_arrivals() -> None:
    engine = ScriptedEngine(seconds=0.3)
    block = load(*prompts(20), traffic=Traffic(request_rate=200), arrival_seed=3)
    start = time.perf_counter()
    _, records = asyncio.run(run_load(engine, block))
    assert engine.most == 20  # all arrive before the first answer is complete
    waited = np.asarray(engine.asked_at) - start - np.asarray(block.arrivals_s())
    assert waited.min() >= -TICK_S  # never early
    assert all(r.ttft_s >= w - 0.1 for r, w in zip(records, waited, strict=True))


class BusyLoopEngine(ScriptedEngine):
    """Blocks the client's loop for a while when the first request comes."""

    async def async_generate(self, **request: Any) -> AsyncIterator[dict[str, Any]]:
        if not self.asked:
            time.sleep(0.2)
        return await super().async_generate(**request)


def test_ttft_counts_from_the_arrival_and_not_from_the_sending() -> None:
    block = load(*prompts(5), traffic=Traffic(request_rate=1000), arrival_seed=1)
    _, records = asyncio.run(run_load(BusyLoopEngine(), block))
    assert min(r.ttft_s for r in records) > 0.2 - max(block.arrivals_s())


def test_arrivals_are_a_poisson_process_of_the_rate_fixed_by_the_seed() -> None:
    block = load(*prompts(2000), traffic=Traffic(request_rate=4.0), arrival_seed=7)
    gaps = np.diff([0, *block.arrivals_s()])
    assert stats.kstest(gaps, stats.expon(scale=0.25).cdf).pvalue > 1e-3
    assert block.arrivals_s() == load(*prompts(2000), traffic=Traffic(request_rate=4.0), arrival_seed=7).arrivals_s()
    assert block.arrivals_s() != load(*prompts(2000), traffic=Traffic(request_rate=4.0), arrival_seed=8).arrivals_s()


def test_traffic_is_ordered_and_named() -> None:
    kinds = [Traffic(request_rate=2.5), Traffic(concurrency=16), Traffic(concurrency=4)]
    assert [t.label for t in sorted(kinds)] == ["c4", "c16", "r2.5"]
    assert [str(t) for t in kinds[:2]] == ["2.5 requests/s", "16 streams"]


def test_without_a_template_a_single_turn_is_sent_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.chat_template is None
    assert turn_request(conversation("a", "def f():\n"), [], tokenizer) == {"prompt": "def f():\n"}
    with_system = conversation("a", "U1", "U2", system="S")
    assert turn_request(with_system, ["A1"], tokenizer) == {"prompt": "S\n\nU1A1\n\nU2"}


def test_the_target_s_template_gives_the_token_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    said = conversation("a", "U1", "U2", system="S")
    tokenizer.chat_template = CHATML
    try:
        request = turn_request(said, ["A1"], tokenizer)
        assert (
            tokenizer.decode(request["input_ids"])
            == "<|system|>S\n<|user|>U1\n<|assistant|>A1\n<|user|>U2\n<|assistant|>"
        )
        assert turn_request(conversation("a", "raw", is_chat=False), [], tokenizer) == {"prompt": "raw"}
        engine = ScriptedEngine()
        asyncio.run(run_load(engine, load(said), tokenizer))
        assert [list(request) for request in engine.asked] == [["input_ids"], ["input_ids"]]
        assert "<answer 1>" in tokenizer.decode(engine.asked[1]["input_ids"])
        plain = ScriptedEngine()
        asyncio.run(run_load(plain, load(said, chat_template=False), tokenizer))
        assert plain.asked[0] == {"prompt": "S\n\nU1"}
        tokenizer.chat_template = REFUSES
        with pytest.raises(ValueError, match="refuses conversation a: no system message, please; chat_template=false"):
            turn_request(said, [], tokenizer)
    finally:
        tokenizer.chat_template = None
