"""Where the time of a speculative step goes.

`StepClock` counts over the life of the scheduler; readers take differences. Without an accelerator host time is the
time, and the clock always runs. On one it runs once it is asked to (`start_step_clock`, or for `/metrics`), with events
of CUDA on the stream (other accelerators have no clock), read when they have passed, so that nothing waits for them. A
pass that is replayed from a graph never asks for its head, so that the head's share is not seen there.

What heads score is counted in some of the steps: without an accelerator the clock asks the head a second time, on one
the heads note it in their passes (`shortlists.py`), where the environment asked for that before these were captured.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from sglang.srt.runtime_context import get_device, get_parallel
from torch import Tensor, nn

from sglang_ext import COUNT_SHORTLISTS
from sglang_ext.adapter.activation import has_accelerator
from sglang_ext.adapter.longest_draft import LongestDraft
from sglang_ext.adapter.shortlists import Shortlists
from sglang_ext.heads import DraftHead

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class StepTotals:
    """Counts and seconds since the start, over all decode steps (prefill is not counted)."""

    steps: int = 0
    requests: int = 0  # of all steps, each as often as it took part in one
    verified_tokens: int = 0  # of all of these, roots and padding included
    head_s: float = 0.0  # the draft head, all draft positions of the step
    head_request_s: float = 0.0  # the same, of each step times its requests: what these waited for the head
    routing_s: float = 0.0  # the part of head_s in a router (`DraftHead.route`), not what is then chosen by its scores
    choice_s: float = 0.0  # the part of head_s in that choice (`DraftHead.choosing`), with the lists of tokens it gives
    embedding_s: float = 0.0  # the drafter's look-up of its input tokens
    step_s: float = 0.0  # drafting with the head (the draft loop and the extend after verification) and verification
    verify_s: float = 0.0  # the target's pass with sampling and cache moves: verification, or a policy's plain step
    # at each draft position: rows that the draft head was asked about in the steps whose shortlists were counted, and
    # the tokens that it scored for these rows
    scoring_rows: list[int] = field(default_factory=list)
    scored_tokens: list[int] = field(default_factory=list)
    most_scored: int = 0  # for one row, since the last reading: readings of a maximum have no difference

    def count_scored(self, position: int, scored: Sequence[int]) -> None:
        """`scored`: tokens, for each row that the head was asked about at this draft position."""
        for counts, number in ((self.scoring_rows, len(scored)), (self.scored_tokens, sum(scored))):
            counts.extend([0] * (position + 1 - len(counts)))
            counts[position] += number
        self.most_scored = max([self.most_scored, *scored])

    def copy(self) -> "StepTotals":
        return replace(self, scoring_rows=list(self.scoring_rows), scored_tokens=list(self.scored_tokens))


COUNT_EVERY = 8  # steps whose shortlists are counted: to count is work that a step without a clock does not do


class StepClock:
    def __init__(self) -> None:
        self.totals = StepTotals()
        self.on_device = has_accelerator()
        self.is_running = not self.on_device
        self.has_events = torch.cuda.is_available()  # what tells the time on one; of other accelerators there is none
        self.is_decoding = False
        self.running = 0  # requests of the step under way
        self.shortlists: Shortlists | None = None  # on an accelerator, where they are counted
        self._unread = deque[tuple[str, torch.cuda.Event, torch.cuda.Event]]()

    def start(self) -> None:
        self.is_running = not self.on_device or self.has_events

    def start_noting(self) -> None:
        """On an accelerator, where the environment asks for it: have the heads that are made from now on note what they
        score. Called before there is any, so that their graphs do, too."""
        if self.on_device and os.environ.get(COUNT_SHORTLISTS) == "1":
            longest = LongestDraft.of_server()
            self.shortlists = Shortlists(longest.steps, max(longest.topk, longest.nodes), get_device().device)

    @property
    def is_counting(self) -> bool:
        """Steps, and what belongs to them but times."""
        return self.is_running or self.shortlists is not None

    @property
    def _counts_shortlists(self) -> bool:
        """Whether this step's are."""
        return self.is_counting and self.is_decoding and self.totals.steps % COUNT_EVERY == 1

    @contextmanager
    def noting(self, requests: int) -> Iterator[None]:
        """Around a step of so many requests."""
        if self.shortlists is None or not self._counts_shortlists or not requests:
            yield
            return
        self.shortlists.clear()
        yield
        self.shortlists.add(requests)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time one part of a step. `name`: a field of `StepTotals` in seconds."""
        if not (self.is_running and self.is_decoding):
            yield
        elif self.on_device:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._unread.append((name, *events))
        else:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start)

    @contextmanager
    def inside_drafting(self, name: str) -> Iterator[None]:
        """A part that a graph's replay would leave out: on an accelerator it is not seen."""
        if self.on_device:
            yield
        else:
            with self.part(name):
                yield

    @contextmanager
    def head(self) -> Iterator[None]:
        with self.inside_drafting("head_s"):
            yield

    @contextmanager
    def routing(self) -> Iterator[None]:
        with self.inside_drafting("head_s"), self.inside_drafting("routing_s"):
            yield

    @contextmanager
    def choosing(self) -> Iterator[None]:
        with self.inside_drafting("choice_s"):
            yield

    def watch(self, heads: nn.Module) -> None:
        """Time what these heads choose, and the heads in them, and have them note what they score."""
        for part in heads.modules():
            if isinstance(part, DraftHead):
                part.choosing = self.choosing
                part.noted = None if self.shortlists is None else self.shortlists.noted_PBR

    def clocked(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.inside_drafting(name):
                return function(*args, **kwargs)

        return inside

    def count_shortlist(self, head: DraftHead, hidden_TH: Tensor, step: int, routed: Tensor | None) -> None:
        """What the head has just scored for these rows. On an accelerator nothing: the host would wait for it, and a
        captured pass would choose a second time at every replay, in the time that is measured. There heads whose router
        decides it note it; of those that score as many tokens for every row nobody need count."""
        if self.on_device or not self._counts_shortlists:
            return
        self.totals.count_scored(step, head.scored(hidden_TH, step, routed).tolist())

    def read(self) -> StepTotals:
        """The totals of all parts that have begun; on an accelerator it waits for them."""
        if self._unread:
            self._unread[-1][2].synchronize()
        if self.shortlists is not None:
            counts = self.totals
            counts.scoring_rows, counts.scored_tokens, counts.most_scored = self.shortlists.read()
        return self.read_ended()

    def read_ended(self) -> StepTotals:
        """The totals of the steps that are known to have ended, each with all its parts. Steps end in their order."""
        while (last := self._parts_of_a_step()) and self._unread[last - 1][2].query():
            for _ in range(last):
                name, start, end = self._unread.popleft()
                self._add(name, start.elapsed_time(end) / 1e3)
        return self.totals

    def _parts_of_a_step(self) -> int:
        """Of the unread ones, up to the first whole step, which ends the list of its parts; 0 where there is none."""
        return next((i for i, (name, _, _) in enumerate(self._unread, 1) if name == "step_s"), 0)

    def _add(self, name: str, seconds: float) -> None:
        setattr(self.totals, name, getattr(self.totals, name) + seconds)
        if name == "head_s":
            self.totals.head_request_s += seconds * self.running


CLOCK = StepClock()


def start_step_clock(scheduler: Any) -> None:
    """Installed as `Scheduler.rayspec_start_step_clock`."""
    CLOCK.start()


def write_step_clock(scheduler: Any, path: str) -> None:
    """Installed as `Scheduler.rayspec_write_step_clock`: the totals as JSON (an RPC carries no answer), null where no
    clock runs or counts. Every rank is called, and ranks of other nodes do not have the path. The next reading's
    `most_scored` is that of the steps from here on."""
    totals = CLOCK.read() if CLOCK.is_counting else None  # on every rank, or events would pile up there
    if get_parallel().tp_rank == 0:
        Path(path).write_text(json.dumps(totals and asdict(totals)))
    CLOCK.totals.most_scored = 0
