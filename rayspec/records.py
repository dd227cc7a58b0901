"""What a measurement leaves behind, per request and per block. Plain values: they travel through Ray and to JSON."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, Self

from pydantic import Field

from sglang_ext.settings import Settings

MOST_COUNTED = 10**6  # in one answer to a canary prompt: a record comes from whoever wrote it


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One answered request. Times are wall-clock seconds of the client, from the request's arrival.

    `accepted_histogram[j]` counts the verify steps in which exactly j drafts were accepted. As SGLang counts them,
    verify steps leave out the prefill, which gives the first output token, and accepted drafts include those of the
    last step that fall behind the end of the answer (max_new_tokens, or an EOS inside the block).
    """

    prompt_id: str
    turn: int = 0  # of the conversation, from 0
    category: str
    prompt_tokens: int
    cached_tokens: int
    output_ids: tuple[int, ...]
    finish_reason: str
    ttft_s: float
    e2e_s: float
    chunk_gaps_s: tuple[float, ...]  # between streamed chunks; one chunk may carry several tokens
    verify_steps: int
    accepted_drafts: int
    accepted_histogram: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Counted(Protocol):
    """An answer, and what was drafted for it."""

    @property
    def output_ids(self) -> tuple[int, ...]: ...

    @property
    def verify_steps(self) -> int: ...

    @property
    def accepted_drafts(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class CanaryAnswer(Settings):
    """What a drafter did on a canary prompt, with which a greedy answer of the same tokens is compared later."""

    prompt: str
    output_sha256: str  # see `ids_sha256`
    verify_steps: Annotated[int, Field(ge=0, le=MOST_COUNTED)]
    accepted_drafts: Annotated[int, Field(ge=0, le=MOST_COUNTED)]

    @classmethod
    def of(cls, prompt: str, answer: "Counted") -> Self:
        return cls(
            prompt=prompt,
            output_sha256=ids_sha256(answer.output_ids),
            verify_steps=answer.verify_steps,
            accepted_drafts=answer.accepted_drafts,
        )


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The continuation of a prompt, and how often the target was asked for it; 0 without speculation."""

    output_ids: list[int]
    verify_steps: int


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Where the time of the speculative steps of a block went, as the engine clocked it; host time, so CPU only. An
    accelerator's engine counts alone, and all seconds are 0.

    `draft_s` holds `head_s` and `embedding_s`, `head_s` holds `routing_s`, that of a router before the layer, and
    `choice_s`, that of the choice by a router's scores (`embedding_s` and `routing_s` are 0, `choice_s` is None in
    records from before they were clocked); a step serves all requests that run together. `requests`: of all steps, each
    as often as it took part in one. `head_request_s`: `head_s` of each step times its requests, which all waited for
    it; None in records from before that was counted. `verified_tokens`: of all `requests`, roots and padding included.
    `scored_tokens`: by the draft head for `scoring_rows` rows at all draft positions, in a share of the steps; 0 of 0
    where they were not counted. `most_scored`: for one of these rows; 0 in records from before that was counted.
    `_by_position`: the two sums at each draft position (empty in records from before these were told apart, which say
    nothing of a single position).
    """

    steps: int
    requests: int
    verified_tokens: int
    head_s: float
    draft_s: float
    verify_s: float
    routing_s: float = 0.0
    embedding_s: float = 0.0
    choice_s: float | None = None
    head_request_s: float | None = None
    scoring_rows: int = 0
    scored_tokens: int = 0
    most_scored: int = 0
    scoring_rows_by_position: tuple[int, ...] = ()
    scored_tokens_by_position: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One block answered by an engine; `step_seconds` is None without speculation, and of an accelerator in records
    from before its engines counted."""

    wall_s: float
    requests: tuple[RequestRecord, ...]
    step_seconds: StepSeconds | None = None
    other_cpu_share: float | None = None  # share of the CPU time that other programs used meanwhile; None if unknown
    peak_memory_bytes: int | None = None  # host memory of the engine's processes; None where it cannot be read


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """One block of one trial: the same prompts that every other trial answers in the same window of time.

    `prompt_block` names the prompts (the unit that the bootstrap resamples), `index` the measurement in time.
    """

    index: int
    prompt_block: int
    measured: Measured

    @property
    def wall_s(self) -> float:
        return self.measured.wall_s

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        return self.measured.requests

    @property
    def output_tokens(self) -> int:
        return sum(r.output_tokens for r in self.requests)


def ids_sha256(token_ids: Sequence[int]) -> str:
    """The fingerprint of a sequence of tokens."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()
