"""Closed-loop load on an engine: `concurrency` streams, each sending its next prompt when its last is answered."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from rayspec.records import RequestRecord
from rayspec.workloads import Prompt


class StreamingEngine(Protocol):
    """The part of sglang.Engine that load needs."""

    async def async_generate(self, prompt: str, sampling_params: dict[str, Any], *, stream: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Load:
    """One block to answer. Fields are those of the sweep's config."""

    prompts: tuple[Prompt, ...]
    concurrency: int
    max_new_tokens: int
    temperature: float
    ignore_eos: bool

    def sampling_params(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
        }


class RequestFailed(RuntimeError):
    """The engine refused or aborted a request."""


async def closed_loop(engine: StreamingEngine, load: Load) -> tuple[float, tuple[RequestRecord, ...]]:
    """Answer all prompts of the block: (wall seconds, records in the order of the prompts). Raises RequestFailed."""
    waiting = list(enumerate(load.prompts))[::-1]
    records: dict[int, RequestRecord] = {}

    async def stream() -> None:
        while waiting:
            index, prompt = waiting.pop()
            records[index] = await _answer(engine, prompt, load.sampling_params())

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:  # the first failure cancels the other streams
        for _ in range(min(load.concurrency, len(load.prompts))):
            group.create_task(stream())
    return time.perf_counter() - start, tuple(records[i] for i in range(len(load.prompts)))


async def _answer(engine: StreamingEngine, prompt: Prompt, sampling_params: dict[str, Any]) -> RequestRecord:
    start = time.perf_counter()
    arrivals: list[float] = []
    last: dict[str, Any] = {}
    async for chunk in await engine.async_generate(prompt.text, sampling_params, stream=True):
        arrivals.append(time.perf_counter() - start)
        last = chunk
    if not last:
        raise RequestFailed(f"prompt {prompt.id}: the engine sent nothing")
    return _record(prompt, last["output_ids"], last["meta_info"], arrivals)


def _record(
    prompt: Prompt, output_ids: Sequence[int], meta: dict[str, Any], arrivals: Sequence[float]
) -> RequestRecord:
    reason = meta["finish_reason"] or {"type": "none"}
    if reason["type"] not in ("length", "stop"):
        raise RequestFailed(f"prompt {prompt.id}: ended with {reason['type']}: {reason.get('message', 'no message')}")
    return RequestRecord(
        prompt_id=prompt.id,
        category=prompt.category,
        prompt_tokens=meta["prompt_tokens"],
        cached_tokens=meta.get("cached_tokens", 0),
        output_ids=tuple(output_ids),
        finish_reason=reason["type"],
        ttft_s=arrivals[0],
        e2e_s=arrivals[-1],
        chunk_gaps_s=tuple(b - a for a, b in pairwise(arrivals)),
        # absent without speculation, and where the prefill's token was the whole answer
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=meta.get("spec_num_correct_drafts", 0),
        accepted_histogram=tuple(meta.get("spec_correct_drafts_histogram", ())),
    )
