"""Sides of a gate without an engine, and a clock that only they move."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayspec.gate.sides import Answer, BlockAnswers
from rayspec.workloads import Conversation


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeSide:
    """Answers of 20 tokens and 10 verify steps in `seconds`, but for what `change` makes of an answer's fields."""

    def __init__(
        self,
        label: str,
        clock: Clock,
        log: list[tuple[str, str]],
        *,
        seconds: float = 1.0,
        change: Callable[[str], dict[str, object]] = lambda prompt_id: {},
        noise: np.random.Generator | None = None,
        counts_blocks: bool = False,
    ) -> None:
        self.label, self.clock, self.log = label, clock, log
        self.seconds, self.change, self.noise, self.counts_blocks = seconds, change, noise, counts_blocks

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        wall_s = self.seconds * (1 if self.noise is None else float(np.exp(self.noise.normal(0, 0.02))))
        self.clock.now += wall_s
        self.log += [(self.label, p.id) for p in prompts]
        answers = [self._answer(p.id, wall_s) for p in prompts]
        if self.counts_blocks:
            steps, accepted = (sum(getattr(a, n) for a in answers) for n in ("verify_steps", "accepted_drafts"))
            silent = [replace(a, verify_steps=0, accepted_drafts=0) for a in answers]
            answers = [replace(silent[0], verify_steps=steps, accepted_drafts=accepted), *silent[1:]]
        return BlockAnswers(wall_s=wall_s, answers=tuple(answers))

    def _answer(self, prompt_id: str, wall_s: float) -> Answer:
        fields = {
            "prompt_id": prompt_id,
            "turn": 0,
            "prompt_tokens": 7,
            "tokens": 20,
            "output": (1, 2, 3),
            "verify_steps": 10,
            "accepted_drafts": 10,
            "ttft_s": 0.1,
            "e2e_s": wall_s,
        }
        return Answer(**(fields | self.change(prompt_id)))  # type: ignore[arg-type]

    def stop(self) -> None:
        pass


def conversations(count: int) -> list[Conversation]:
    return [Conversation(id=f"p{i}", category="c", turns=(f"text {i}",)) for i in range(count)]
