"""What the gate measures: an engine or a server that answers blocks of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rayspec.workloads import Conversation


class MeasureFailed(RuntimeError):
    """A side could not answer; the message names it, says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered turn. `output`: token ids, or a server's text. `verify_steps` and
    `accepted_drafts` are 0 where nothing was drafted, or where the server does not tell."""

    prompt_id: str
    turn: int
    prompt_tokens: int
    tokens: int
    output: tuple[int, ...] | str
    verify_steps: int
    accepted_drafts: int
    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, kw_only=True)
class BlockAnswers:
    """A block of prompts, answered side by side in `wall_s` seconds."""

    wall_s: float
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.answers)

    @property
    def seconds_per_token(self) -> float:
        return self.wall_s / self.tokens


class Side(Protocol):
    """A baseline or a candidate. Its methods raise MeasureFailed."""

    label: str
    counts_blocks: bool  # its verify steps are only known of a whole block, and are those of its first answer

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        """Answer the prompts, all at once."""
        ...

    def stop(self) -> None: ...
