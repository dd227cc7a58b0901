"""Latency of draft heads alone: the part of a draft step that a head changes. T = rows, H = hidden size."""

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.heads import DraftHead
from sglang_ext.heads.by_position import PositionHeads

ROUNDS = 7
MIN_ROUND_S = 0.05


def head_latencies(
    drafters: Mapping[str, str], *, rows: int, draft_steps: int, dtype: torch.dtype, num_threads: int, topk: int = 1
) -> dict[str, float]:
    """Median seconds of a head's answer to `rows` requests, for each {name: checkpoint folder}.

    That is what the draft loop asks of it, routing included, on the same packed weights; the mean over the draft
    positions 0..draft_steps-1, at which a position-aware head does not cost the same. Of a chain (`topk` 1) the best
    token of a row a request; of a tree the `topk` best, and where the drafter goes step by step `topk` rows a request
    from position 1 on.

    On a CPU the heads take turns for `ROUNDS` rounds, so that a drift of the clock frequency meets all of them. Beside
    an engine a GPU has no room for the heads of a sweep: there each has its rounds alone.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    groups = [dict(drafters)] if device.type == "cpu" else [{name: path} for name, path in drafters.items()]
    timed: dict[str, float] = {}
    for group in groups:
        timed |= _in_turns(group, rows, draft_steps, dtype, device, num_threads, topk)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return timed


def _in_turns(
    drafters: Mapping[str, str],
    rows: int,
    draft_steps: int,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    topk: int,
) -> dict[str, float]:
    loaded = {name: load_drafter(path, dtype)[0] for name, path in drafters.items()}
    heads = {name: drafter.lm_head.to(device) for name, drafter in loaded.items()}
    loads = {
        name: HeadLoad(rows, rows if drafter.config.max_draft_steps else rows * topk, topk, draft_steps)
        for name, drafter in loaded.items()
    }
    if device.type == "cpu":
        for head in heads.values():
            head.pack()
    timers = {name: _timer(head, loads[name], dtype, device, num_threads) for name, head in heads.items()}
    with torch.inference_mode():
        calls = {name: _calls_per_round(timer) for name, timer in timers.items()}
        rounds = [{name: timer.timeit(calls[name]).mean for name, timer in timers.items()} for _ in range(ROUNDS)]
    return {name: median(r[name] for r in rounds) / draft_steps for name in heads}


class HeadLoad(NamedTuple):
    """What a head is asked in one step: rows at position 0 and at the later ones, candidates of each."""

    first_rows: int
    later_rows: int
    topk: int
    draft_steps: int


def _timer(
    head: DraftHead | PositionHeads, asked: HeadLoad, dtype: torch.dtype, device: torch.device, threads: int
) -> Timer:
    generator = torch.Generator().manual_seed(0)
    head.expect_rows((1, asked.later_rows // asked.first_rows))
    rows_TH = torch.randn(asked.later_rows, head.at(0).hidden_size, generator=generator).to(device, dtype)

    def ask() -> None:
        for step in range(asked.draft_steps):
            own = head.at(step)
            hidden_TH = rows_TH if step else rows_TH[: asked.first_rows]
            routed = own.route(hidden_TH, hidden_TH, step)
            if asked.topk == 1:
                own.best(hidden_TH, step, routed)
            else:
                own.propose(hidden_TH, step, asked.topk, routed)

    return Timer("ask()", globals={"ask": _captured(ask) if device.type == "cuda" else ask}, num_threads=threads)


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
    return graph.replay


def _calls_per_round(timer: Timer) -> int:
    timer.timeit(3)  # first calls allocate
    return max(3, int(MIN_ROUND_S / timer.timeit(10).mean))
