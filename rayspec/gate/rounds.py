"""The gate's loop: rounds of A B B A, in an order that is drawn, until the figures are decided or the time is over."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log

from rayspec.gate.config import GateConfig
from rayspec.gate.decision import (
    FALSE_ALARM,
    FIRST_LOOK,
    MIN_PROMPTS,
    SAME_REPEATS,
    FigureTest,
    Verdict,
    clusters_for_tau,
    next_look,
    overall,
    speed_bounds,
    tau_bounds,
)
from rayspec.gate.sides import Answer, BlockAnswers, MeasureFailed, Side
from rayspec.workloads import Conversation

SIDES = ("baseline", "candidate")
Block = Sequence[Conversation]


@dataclass
class Counts:
    """Verify steps and accepted drafts of (baseline, candidate), by cluster."""

    steps: dict[str, list[int]] = field(default_factory=dict)
    accepted: dict[str, list[int]] = field(default_factory=dict)

    def add(self, cluster: str, side: int, answer: Answer) -> None:
        self.steps.setdefault(cluster, [0, 0])[side] += answer.verify_steps
        self.accepted.setdefault(cluster, [0, 0])[side] += answer.accepted_drafts

    def known(self) -> tuple[list[list[int]], list[list[int]]]:
        """(steps, accepted drafts) of the clusters in which both sides have taken a step."""
        clusters = [c for c, steps in self.steps.items() if all(steps)]
        return [self.steps[c] for c in clusters], [self.accepted[c] for c in clusters]

    def tau(self, side: int) -> float | None:
        """Pooled; None where nothing was drafted, or the server does not say."""
        steps = sum(s[side] for s in self.steps.values())
        return 1 + sum(a[side] for a in self.accepted.values()) / steps if steps else None


@dataclass
class Measurements:
    """What the rounds gave, of the (baseline, candidate)."""

    losses: list[float] = field(default_factory=list)  # of speed, -log(candidate / baseline), one a round
    tokens: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    cluster_of: Mapping[str, str] = field(default_factory=dict)  # of a prompt: itself, or the first one of its block
    counts: Counts = field(default_factory=Counts)  # of all answers
    first_counts: Counts = field(default_factory=Counts)  # of first ones: a pass that has begun again weighs nothing
    answers: dict[tuple[str, int], list[Answer | None]] = field(default_factory=dict)  # first ones, by prompt and turn
    repeats: int = 0  # answers to what the side had answered before
    changed: int = 0  # those of them that were others than the first
    rounds: list[list[tuple[int, float, int]]] = field(default_factory=list)  # (side, seconds, tokens), as measured

    def add(self, blocks: Sequence[tuple[int, BlockAnswers]]) -> None:
        """A round: (side, answers) in the order of measurement."""
        logs = [0.0, 0.0]
        for side, block in blocks:
            logs[side] += log(block.seconds_per_token) / 2
            self.tokens[side] += block.tokens
            self.seconds[side] += block.wall_s
            for answer in block.answers:
                self._add_answer(side, answer)
        self.losses.append(logs[1] - logs[0])
        self.rounds.append([(side, block.wall_s, block.tokens) for side, block in blocks])

    def _add_answer(self, side: int, answer: Answer) -> None:
        cluster = self.cluster_of[answer.prompt_id]
        self.counts.add(cluster, side, answer)
        both = self.answers.setdefault((answer.prompt_id, answer.turn), [None, None])
        first = both[side]
        if first is None:
            both[side] = answer
            self.first_counts.add(cluster, side, answer)
        else:
            self.repeats += 1
            self.changed += _said(first) != _said(answer)

    @property
    def repeat(self) -> bool:
        """Whether enough answers came again, all of them as before."""
        return self.repeats >= SAME_REPEATS and not self.changed

    def mismatches(self) -> list[str]:
        """Prompts whose first difference is not that of an earlier turn, in the order of measurement."""
        found: dict[str, None] = {}
        for (prompt_id, _), (base, own) in self.answers.items():
            if base is not None and own is not None and base.output != own.output:
                found[prompt_id] = None
        return list(found)


def _said(answer: Answer) -> tuple[object, ...]:
    """What is the same each time, if answers are."""
    return answer.output, answer.verify_steps, answer.accepted_drafts


def orders(num_blocks: int, seed: int, coin: random.Random) -> Iterator[tuple[int, int, list[int]]]:
    """Rounds without end: two blocks, and the sides that answer the first, the first, the second and the second. Every
    pass takes the blocks in another order, which is the seed's; who begins a round is the coin's."""
    rng = random.Random(seed)
    while True:
        blocks = list(range(num_blocks))
        rng.shuffle(blocks)
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            yield first, second, [0, 1, 1, 0] if coin.random() < 0.5 else [1, 0, 0, 1]


class Gate:
    """Measures two sides over the blocks of a workload and decides. `coin`: of the operating system but in
    simulations, so that no two gates have the same throws."""

    def __init__(
        self,
        config: GateConfig,
        sides: Sequence[Side],
        prompts: Sequence[Conversation],
        *,
        has_tau: bool,
        clock: Callable[[], float] = time.monotonic,
        coin: random.Random | None = None,
    ) -> None:
        size = config.concurrency
        self.config = config
        self.sides = sides
        check_workload(config, len(prompts))
        whole = len(prompts) // (2 * size) * 2 * size  # a round takes two blocks; what is left over sits out
        self.blocks: list[Block] = [prompts[i : i + size] for i in range(0, whole, size)]
        by_block = any(side.counts_blocks for side in sides)
        self.measured = Measurements(cluster_of={p.id: (b[0] if by_block else p).id for b in self.blocks for p in b})
        self._num_clusters = len(self.blocks) if by_block else whole
        self._needed = clusters_for_tau(size if by_block else 1, whole if config.is_greedy else None)
        self.is_sample = True  # what tau is judged by
        each = FALSE_ALARM / 2 if has_tau else FALSE_ALARM
        self.speed = FigureTest(config.speed_loss, each)
        self.tau = FigureTest(config.tau_loss, each) if has_tau else None
        self.used_share = 0.0
        self.measuring_s = 0.0
        self._clock = clock
        self._coin = random.SystemRandom() if coin is None else coin

    @property
    def verdict(self) -> Verdict:
        return overall([test.verdict for test in (self.speed, self.tau) if test is not None])

    def run(self, deadline: float, on_round: Callable[["Gate"], None] = lambda gate: None) -> Verdict:
        """Measure until the verdict is clear, but not beyond `deadline` of the clock. Raises MeasureFailed."""
        begin, longest, look_at = self._clock(), 0.0, FIRST_LOOK
        for first, second, order in orders(len(self.blocks), self.config.seed, self._coin):
            start = self._clock()
            is_last = start + longest > deadline
            self.used_share = 1.0 if is_last else (start - begin) / (deadline - begin)
            if len(self.measured.losses) >= look_at or (is_last and self.measured.losses):
                self._look()
                look_at = next_look(len(self.measured.losses))
            if is_last or self._is_decided():
                break
            self._round(first, second, order)
            longest = max(longest, self._clock() - start)
            self.measuring_s = self._clock() - begin
            on_round(self)
        return self.verdict

    def _is_decided(self) -> bool:
        if self.verdict is Verdict.REGRESSION:
            return True
        return self.speed.is_over and (self.tau is None or self.tau.is_over)

    def _look(self) -> None:
        self.speed.look(self.used_share, speed_bounds(self.measured.losses))
        if self.tau is None or self.tau.is_over:
            return
        self.is_sample = not (self.config.is_greedy and self.measured.repeat)
        steps, accepted = self.judged_counts.known()
        if not steps:
            return
        population = None if self.is_sample else self._num_clusters
        share = 1.0 if len(steps) == population else self.used_share  # no later answer says more
        self.tau.look(share, tau_bounds(steps, accepted, population=population, needed=self._needed))

    @property
    def judged_counts(self) -> Counts:
        """Those that tau's verdict is about."""
        return self.measured.counts if self.is_sample else self.measured.first_counts

    def _round(self, first: int, second: int, order: Sequence[int]) -> None:
        blocks = []
        for i, side in enumerate(order):
            prompts = self.blocks[first if i < 2 else second]
            answers = self.sides[side].answer(prompts)
            empty = next((a.prompt_id for a in answers.answers if not a.tokens), None)
            if empty is not None:
                raise MeasureFailed(
                    f"{SIDES[side]} {self.sides[side].label}: the answer to prompt {empty} is empty, so that it has no "
                    "speed; look whether the server has the right model and chat template, set ignore_eos=true, or "
                    "leave the prompt out"
                )
            blocks.append((side, answers))
        self._check_tokenizers(blocks)
        self.measured.add(blocks)

    def _check_tokenizers(self, blocks: Sequence[tuple[int, BlockAnswers]]) -> None:
        """Tokens a second are comparable where both count the same tokens."""
        counts: dict[str, list[int]] = {}
        for _, block in sorted(blocks, key=lambda b: b[0]):
            for answer in block.answers:
                if answer.turn == 0:  # later ones hold an answer, which may differ
                    counts.setdefault(answer.prompt_id, []).append(answer.prompt_tokens)
        for prompt_id, (base, own) in counts.items():
            if base != own:
                raise MeasureFailed(
                    f"prompt {prompt_id} has {base} tokens for the baseline and {own} for the candidate: they have "
                    "other tokenizers or chat templates, so that their tokens cannot be compared; gate servers of one "
                    "target (chat_template=false sends plain text)"
                )


def check_workload(config: GateConfig, num_prompts: int) -> None:
    """Raise ValueError for fewer prompts than a verdict needs."""
    needed = max(MIN_PROMPTS, 2 * config.concurrency)
    if num_prompts < needed:
        raise ValueError(
            f"workload {config.workload!r} has {num_prompts} prompts; a gate at concurrency={config.concurrency} needs "
            f"at least {needed}: take a larger workload"
        )
