"""Latency of draft heads alone: the part of a draft step that a head changes. T = rows, H = hidden size."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch.utils.benchmark import Timer

from rayspec.messages import first_line
from sglang_ext.drafters.base import Question
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.counting import StepShape
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads

logger = logging.getLogger(__name__)
ROUNDS = 7
MIN_ROUND_S = 0.05


def head_latencies(
    drafters: Mapping[str, str],
    *,
    requests: int,
    shape: StepShape,
    dtype: torch.dtype,
    num_threads: int,
) -> dict[str, float]:
    """Median seconds of a head's answer to so many requests, for each {name: checkpoint folder}.

    That is what the draft loop asks of it (`Drafter.questions`), routing included, on the same packed weights; the mean
    over the draft positions 0..draft_steps-1, at which a position-aware head does not cost the same.

    On a CPU the heads take turns for `ROUNDS` rounds, so that a drift of the clock frequency meets all of them. Beside
    an engine a GPU has no room for the heads of a sweep: there each has its rounds alone, and one that fails is left
    out.
    """
    if not torch.cuda.is_available():
        return _in_turns(drafters, requests, shape, dtype, torch.device("cpu"), num_threads)
    timed: dict[str, float] = {}
    for name, path in drafters.items():
        try:
            timed[name] = head_latency(path, requests=requests, shape=shape, dtype=dtype, num_threads=num_threads)
        except Exception as error:  # for want of memory, or from whichever kernel
            logger.warning("the head of %s was not timed: %s: %s", name, type(error).__name__, first_line(error))
        torch.cuda.empty_cache()
    return timed


def head_latency(drafter: str, *, requests: int, shape: StepShape, dtype: torch.dtype, num_threads: int) -> float:
    """That of one drafter (folder) alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return _in_turns({"": drafter}, requests, shape, dtype, device, num_threads)[""]


def _in_turns(
    drafters: Mapping[str, str],
    requests: int,
    shape: StepShape,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
) -> dict[str, float]:
    loaded = {name: load_drafter(path, dtype)[0] for name, path in drafters.items()}
    heads = {name: drafter.lm_head.to(device) for name, drafter in loaded.items()}
    sizes = shape.draft_steps, shape.topk, shape.num_draft_tokens
    asked = {name: drafter.questions(*sizes) for name, drafter in loaded.items()}
    if device.type == "cpu":
        for head in heads.values():
            head.pack()
    timers = {name: _timer(head, asked[name], requests, dtype, device, num_threads) for name, head in heads.items()}
    with torch.inference_mode():
        calls = {name: _calls_per_round(timer) for name, timer in timers.items()}
        rounds = [{name: timer.timeit(calls[name]).mean for name, timer in timers.items()} for _ in range(ROUNDS)]
    return {name: median(r[name] for r in rounds) / shape.draft_steps for name in heads}


def _timer(
    head: DraftHead | PositionHeads,
    asked: Sequence[Question],
    requests: int,
    dtype: torch.dtype,
    device: torch.device,
    threads: int,
) -> Timer:
    generator = torch.Generator().manual_seed(0)
    head.expect_rows([question.rows for question in asked])
    most_rows = requests * max(question.rows for question in asked)
    rows_TH = torch.randn(most_rows, head.at(0).hidden_size, generator=generator).to(device, dtype)

    def ask() -> None:
        for step, question in enumerate(asked):
            own = head.at(step)
            hidden_TH = rows_TH[: requests * question.rows]
            routed = own.route(hidden_TH, hidden_TH, step)
            if question.candidates == 1:
                own.best(hidden_TH, step, routed)
            else:
                own.propose(hidden_TH, step, question.candidates, routed)

    return Timer("ask()", globals={"ask": _captured(ask) if device.type == "cuda" else ask}, num_threads=threads)


@dataclass(frozen=True)
class _Replayed:
    """Questions as a graph, with what it reads."""

    graph: torch.cuda.CUDAGraph
    ask: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@torch.inference_mode()
def _captured(ask: Callable[[], None]) -> Callable[[], None]:
    """A draft loop on a GPU replays graphs: its launches cost the host nothing. Nothing else runs between replays, so
    that a head as small as the L2 cache stays there, which it would not in a step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ask()  # compiles, and lets libraries allocate their workspaces
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ask()
    return _Replayed(graph, ask)


def _calls_per_round(timer: Timer) -> int:
    timer.timeit(3)  # first calls allocate
    return max(3, int(MIN_ROUND_S / timer.timeit(10).mean))
