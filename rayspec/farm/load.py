"""Load on an engine: closed loop, or arrivals at random or recorded times.

Closed loop: `concurrency` streams, each beginning its next conversation when its last has ended. Open loop: a Poisson
process of `request_rate` conversations a second, or a trace's own arrivals at `trace_speed` times their speed; neither
waits for answers. In all, a later turn of a conversation is sent as soon as the answer before it is complete.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rayspec.farm.chat import ChatTokenizer, turn_request
from rayspec.records import RequestRecord
from rayspec.workloads import Conversation
from rayspec.workloads.traces import TracedRequest


class StreamingEngine(Protocol):
    """The part of sglang.Engine that load needs; a request has a `prompt` or `input_ids`."""

    async def async_generate(self, *, sampling_params: dict[str, Any], stream: bool, **request: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True, order=True)
class Traffic:
    """How requests come, in a closed loop or in an open one, and which temperature they ask for, where a sweep has
    several. Ordered: by temperature, closed loops first, traces last, then by size."""

    temperature: float | None = None  # None: the only one of its sweep
    trace_speed: float = 0.0  # times a trace's own
    request_rate: float = 0.0  # conversations a second
    concurrency: int = 0  # streams

    def __post_init__(self) -> None:
        kinds = (self.trace_speed > 0, self.request_rate > 0, self.concurrency > 0)
        assert sum(kinds) == 1, "either a closed loop, or random arrivals, or a trace's"

    @property
    def is_open(self) -> bool:
        return self.concurrency == 0

    @property
    def is_trace(self) -> bool:
        return self.trace_speed > 0

    @property
    def label(self) -> str:
        """For names of trials: `c4`, `r2.5`, `x2`, `c4-t1`."""
        load = f"r{self.request_rate:g}" if self.is_open else f"c{self.concurrency}"
        load = f"x{self.trace_speed:g}" if self.is_trace else load
        return load if self.temperature is None else f"{load}-t{self.temperature:g}"

    def __str__(self) -> str:
        load = f"{self.concurrency} stream{'s' if self.concurrency > 1 else ''}"
        load = f"{self.request_rate:g} requests/s" if self.is_open else load
        load = f"the trace at {self.trace_speed:g}x" if self.is_trace else load
        return load if self.temperature is None else f"{load}, temperature {self.temperature:g}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """One block to answer. `arrival_seed` fixes random times of an open loop, so that all trials meet the same.
    `max_new_tokens` is for requests that do not say how long their answers are."""

    prompts: tuple[Conversation, ...]
    traffic: Traffic
    max_new_tokens: int
    temperature: float
    ignore_eos: bool
    arrival_seed: int = 0
    chat_template: bool = True  # where the target's tokenizer has one
    has_own_lengths: bool = True  # False: max_new_tokens for all, to warm an engine up

    def sampling_params(self, conversation: Conversation) -> dict[str, Any]:
        own = conversation.output_tokens if isinstance(conversation, TracedRequest) else None
        return {
            "max_new_tokens": (self.has_own_lengths and own) or self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        }

    def arrivals_s(self) -> list[float]:
        """When the conversations of an open loop arrive, in seconds after the start: a Poisson process, or the trace's
        own times from the block's first request on."""
        if self.traffic.is_trace:
            times = [p.arrival_s for p in self.prompts if isinstance(p, TracedRequest)]
            assert len(times) == len(self.prompts), "a trace's speed is for requests of a trace"
            return [(t - times[0]) / self.traffic.trace_speed for t in times]
        gaps = np.random.default_rng(self.arrival_seed).exponential(1 / self.traffic.request_rate, len(self.prompts))
        return [float(t) for t in gaps.cumsum()]


class RequestFailed(RuntimeError):
    """The engine refused or aborted a request."""


async def run_load(
    engine: StreamingEngine, load: Load, tokenizer: ChatTokenizer | None = None
) -> tuple[float, tuple[RequestRecord, ...]]:
    """Answer a block: (wall seconds, records in the order of conversations and turns). Raises RequestFailed."""
    tokenizer = tokenizer if load.chat_template else None
    answered: dict[int, list[RequestRecord]] = {}
    start = time.perf_counter()

    async def converse(index: int, arrival: float) -> None:
        answered[index] = await _converse(engine, load, load.prompts[index], tokenizer, arrival)

    async def stream(waiting: list[int]) -> None:
        while waiting:
            await converse(waiting.pop(), time.perf_counter())

    async def arrive(index: int, after_s: float) -> None:
        await asyncio.sleep(start + after_s - time.perf_counter())
        await converse(index, start + after_s)  # a late loop counts as waiting, as it does for a client

    async with asyncio.TaskGroup() as group:  # the first failure cancels the others
        if load.traffic.is_open:
            for index, after_s in enumerate(load.arrivals_s()):
                group.create_task(arrive(index, after_s))
        else:
            waiting = list(range(len(load.prompts)))[::-1]
            for _ in range(min(load.traffic.concurrency, len(load.prompts))):
                group.create_task(stream(waiting))
    wall_s = time.perf_counter() - start
    return wall_s, tuple(record for i in range(len(load.prompts)) for record in answered[i])


async def _converse(
    engine: StreamingEngine, load: Load, conversation: Conversation, tokenizer: ChatTokenizer | None, arrival: float
) -> list[RequestRecord]:
    """All turns of a conversation whose first arrives at `arrival` (of time.perf_counter)."""
    answers: list[str] = []
    records: list[RequestRecord] = []
    for turn in range(len(conversation.turns)):
        name = f"prompt {conversation.id}" + (f", turn {turn + 1}" if turn else "")
        chunk_times: list[float] = []
        last: dict[str, Any] = {}
        request = turn_request(conversation, answers, tokenizer)
        stream = await engine.async_generate(**request, sampling_params=load.sampling_params(conversation), stream=True)
        async for chunk in stream:
            chunk_times.append(time.perf_counter() - arrival)
            last = chunk
        if not last:
            raise RequestFailed(f"{name}: the engine sent nothing")
        records.append(_record(conversation, turn, name, last["output_ids"], last["meta_info"], chunk_times))
        answers.append(last["text"])
        arrival = time.perf_counter()
    return records


def _record(
    conversation: Conversation,
    turn: int,
    name: str,
    output_ids: Sequence[int],
    meta: dict[str, Any],
    chunk_times: Sequence[float],
) -> RequestRecord:
    reason = meta["finish_reason"] or {"type": "none"}
    if reason["type"] not in ("length", "stop"):
        raise RequestFailed(f"{name}: ended with {reason['type']}: {reason.get('message', 'no message')}")
    return RequestRecord(
        prompt_id=conversation.id,
        turn=turn,
        category=conversation.category,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta.get("cached_tokens", 0),
        output_ids=tuple(output_ids),
        finish_reason=reason["type"],
        ttft_s=chunk_times[0],
        e2e_s=chunk_times[-1],
        chunk_gaps_s=tuple(b - a for a, b in pairwise(chunk_times)),
        # absent without speculation, and where the prefill's token was the whole answer
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=meta.get("spec_num_correct_drafts", 0),
        accepted_histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
    )
