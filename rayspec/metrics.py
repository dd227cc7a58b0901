"""Turns raw counts into the named metrics of a trial.

`tau` pools: 1 + accepted drafts / verify steps over all requests of the trial. The first output token comes from the
prefill and is in neither count. SGLang counts a step's whole acceptance even where the answer ends inside it, which is
what makes tau free of the answer's length; `tau_emitted` counts only the tokens that left the server, so it is lower,
the more the shorter the answers are. Per-position shares come from the histogram of the same steps.

TTFT is measured by the client, from the request's arrival, so that under open-loop load it holds the wait in the queue.
TPOT = (e2e - TTFT) / (output tokens - 1) of a request. ITL is the time between streamed chunks, which carry several
tokens under speculation: it is no TPOT. Goodput counts the requests that keep both limits of an `Slo`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rayspec.names import safe_name
from rayspec.records import BlockRecord, RequestRecord
from sglang_ext.settings import Settings, require

PERCENTILES = (50, 90, 99)
TAU_CATEGORY = "tau_category/"  # before the name of a prompt category

T = TypeVar("T", float, NDArray[np.float64])


@dataclass(frozen=True, kw_only=True)
class Slo(Settings):
    """A service-level objective: the limits that a request must keep; None is no limit. Milliseconds."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            require(value is None or value > 0, f"slo.{name}", value, "positive, or absent for no limit")

    def is_met(self, request: RequestRecord) -> bool:
        """An answer of one token has no TPOT, and keeps that limit."""
        tpot_s = request.tpot_s
        is_prompt = self.ttft_ms is None or 1e3 * request.ttft_s <= self.ttft_ms
        return is_prompt and (self.tpot_ms is None or tpot_s is None or 1e3 * tpot_s <= self.tpot_ms)


def trial_metrics(blocks: Sequence[BlockRecord], draft_steps: int, slo: Slo | None = None) -> dict[str, float]:
    """Metrics of one trial over its blocks; `draft_steps` is 0 without speculation."""
    requests = [r for b in blocks for r in b.requests]
    assert requests, "a trial is scored only once it has answered something"
    wall_s = sum(b.wall_s for b in blocks)
    tokens = sum(r.output_tokens for r in requests)
    metrics = {
        "requests": float(len(requests)),
        "output_tokens": float(tokens),
        "wall_s": wall_s,
        "output_tokens_per_s": tokens / wall_s,
        "requests_per_s": len(requests) / wall_s,
    }
    peaks = [b.measured.peak_memory_bytes for b in blocks if b.measured.peak_memory_bytes is not None]
    if peaks:
        metrics["peak_host_memory_gib"] = max(peaks) / 2**30
    shares = [(b.measured.other_cpu_share, b.wall_s) for b in blocks if b.measured.other_cpu_share is not None]
    if shares:
        metrics["other_cpu_share"] = sum(share * s for share, s in shares) / sum(s for _, s in shares)
    metrics |= latency_metrics(requests)
    metrics |= goodput_metrics(requests, wall_s, slo or Slo())
    if draft_steps:
        metrics |= acceptance_metrics(requests, draft_steps)
        metrics |= step_metrics(blocks)
    return metrics


def latency_metrics(requests: Sequence[RequestRecord]) -> dict[str, float]:
    """TTFT, TPOT and ITL percentiles in milliseconds; one that no request can give is left out."""
    series = {
        "ttft_ms": [r.ttft_s for r in requests],
        "tpot_ms": [r.tpot_s for r in requests if r.tpot_s is not None],
        "itl_ms": [gap for r in requests for gap in r.chunk_gaps_s],
    }
    return {
        f"{name}_p{p}": 1e3 * float(np.percentile(values, p))
        for name, values in series.items()
        if values
        for p in PERCENTILES
    }


def goodput_metrics(requests: Sequence[RequestRecord], wall_s: float, slo: Slo) -> dict[str, float]:
    """Share and rate of the requests that keep both limits; empty without a limit."""
    if slo == Slo():
        return {}
    good = sum(slo.is_met(r) for r in requests)
    return {"goodput_share": good / len(requests), "goodput_requests_per_s": good / wall_s}


def acceptance_metrics(requests: Sequence[RequestRecord], draft_steps: int) -> dict[str, float]:
    """tau with its raw counts, and acceptance at draft positions 1..draft_steps.

    `accept_pos_i` is the share of verify steps with at least i accepted drafts, so tau = 1 + their sum;
    `accept_cond_i` is its ratio to position i-1 (left out where that one is 0).
    """
    steps = sum(r.verify_steps for r in requests)
    accepted = sum(r.accepted_drafts for r in requests)
    metrics = {"verify_steps": float(steps), "accepted_drafts": float(accepted)}
    speculated = [r for r in requests if r.verify_steps]
    if not speculated:  # every answer ended with the prefill's token
        return metrics
    emitted = sum(r.output_tokens - 1 for r in speculated)
    decode_s = sum(r.e2e_s - r.ttft_s for r in speculated)
    metrics |= {
        "tau": 1 + accepted / steps,
        "tau_emitted": emitted / steps,
        "tau_request_mean": float(np.mean([1 + r.accepted_drafts / r.verify_steps for r in speculated])),
        "cycle_ms": 1e3 * decode_s / steps,
    }
    histogram = np.zeros(draft_steps + 1)
    for r in speculated:
        histogram[: len(r.accepted_histogram)] += r.accepted_histogram
    share = histogram[::-1].cumsum()[::-1] / steps  # share[i]: at least i accepted
    for i in range(1, draft_steps + 1):
        metrics[f"accept_pos_{i}"] = float(share[i])
        if share[i - 1] > 0:
            metrics[f"accept_cond_{i}"] = float(share[i] / share[i - 1])
    return metrics


def step_metrics(blocks: Sequence[BlockRecord]) -> dict[str, float]:
    """Milliseconds of a speculative step in the head, of that in a router before the layer and in the choice by a
    router's scores, in looking up tokens, in drafting (all of these included) and in verification, and the tokens that
    it verifies of a request, root and padding included. `step_requests`: those that a step serves, in the mean.
    `request_head_ms`: what a request waits for the head in a step, in the mean over requests as `cycle_ms` is, and not
    over steps, of which those at the end of a block serve few. `shortlist_mean`: the tokens that the draft head scored
    for a row, in the mean over rows and draft positions, and `shortlist_max`, for one row at most.

    A step serves all requests that run together. Empty where the engine has no clock, without times where it counts
    alone, and without the choice or the maximum where a block is from before that was clocked.
    """
    clocks = [b.measured.step_seconds for b in blocks if b.measured.step_seconds is not None]
    steps, requests = sum(c.steps for c in clocks), sum(c.requests for c in clocks)
    if not steps:
        return {}
    rows = sum(c.scoring_rows for c in clocks)
    shortlist = {"shortlist_mean": sum(c.scored_tokens for c in clocks) / rows} if rows else {}
    most = [c.most_scored for c in clocks if c.scoring_rows]
    if most and all(most):
        shortlist["shortlist_max"] = float(max(most))
    counts = {
        "step_verified_tokens": sum(c.verified_tokens for c in clocks) / requests,
        "step_requests": requests / steps,
        **shortlist,
    }
    if not any(c.verify_s for c in clocks):
        return counts
    choices = [c.choice_s for c in clocks if c.choice_s is not None]
    choice = {"step_choice_ms": 1e3 * sum(choices) / steps} if len(choices) == len(clocks) else {}
    waits = [c.head_request_s for c in clocks if c.head_request_s is not None]
    waited = {"request_head_ms": 1e3 * sum(waits) / requests} if len(waits) == len(clocks) else {}
    return counts | {
        "step_head_ms": 1e3 * sum(c.head_s for c in clocks) / steps,
        "step_routing_ms": 1e3 * sum(c.routing_s for c in clocks) / steps,
        "step_embedding_ms": 1e3 * sum(c.embedding_s for c in clocks) / steps,
        "step_draft_ms": 1e3 * sum(c.draft_s for c in clocks) / steps,
        "step_verify_ms": 1e3 * sum(c.verify_s for c in clocks) / steps,
        **choice,
        **waited,
    }


def scored_by_position(blocks: Sequence[BlockRecord]) -> tuple[float | None, ...]:
    """The tokens that the draft head scored for a row at each draft position, in the mean over the blocks that have
    counted it; None for a position of which no block has."""
    clocks = [b.measured.step_seconds for b in blocks if b.measured.step_seconds is not None]
    rows, tokens = (
        [sum(at) for at in zip_longest(*counts, fillvalue=0)]
        for counts in (
            [c.scoring_rows_by_position for c in clocks],
            [c.scored_tokens_by_position for c in clocks],
        )
    )
    return tuple(t / r if r else None for t, r in zip(tokens, rows, strict=True))


def tau_by_category(requests: Iterable[RequestRecord]) -> dict[str, float]:
    """Pooled tau of each prompt category, sorted by name."""
    counts: dict[str, tuple[int, int]] = {}
    for r in requests:
        accepted, steps = counts.get(r.category, (0, 0))
        counts[r.category] = (accepted + r.accepted_drafts, steps + r.verify_steps)
    return {name: 1 + accepted / steps for name, (accepted, steps) in sorted(counts.items()) if steps}


def category_key(category: str) -> str:
    """The metric of a category's tau."""
    return f"{TAU_CATEGORY}{safe_name(category)}"


def output_mismatches(blocks: Iterable[BlockRecord], plain: Iterable[BlockRecord]) -> int:
    """Requests whose output tokens differ from those that plain decoding gave to the same turn.

    A turn that comes after a different answer is a different prompt, and is not compared.
    """
    expected: dict[str, list[tuple[int, ...]]] = {}
    for request in (r for b in plain for r in b.requests):
        answers = expected.setdefault(request.prompt_id, [])
        if request.turn == len(answers):  # the first pass is enough
            answers.append(request.output_ids)
    mismatches = 0
    for block in blocks:
        differs: set[str] = set()
        for r in block.requests:
            answers = expected.get(r.prompt_id, [])
            if r.prompt_id not in differs and r.turn < len(answers) and r.output_ids != answers[r.turn]:
                mismatches += 1
                differs.add(r.prompt_id)
    return mismatches


def head_kappa(head_s: float, cycle_s: float) -> float | None:
    """The head's part of a cycle against the rest, T_head / (T_cycle - T_head).

    None where the head takes longer than the whole cycle: then the two were not measured under the same conditions.
    """
    return head_s / (cycle_s - head_s) if head_s < cycle_s else None


def predicted_speedup(rho: float, nu: float, kappa: float) -> float:
    """Speed-up over another head that keeping `rho` of its tau at `nu` of its latency should give, all else equal."""
    return rho * (1 + kappa) / (1 + nu * kappa)


def break_even_rho(nu: T, kappa: float) -> T:
    """The share of tau that a head of relative latency `nu` must keep to be as fast as the baseline's."""
    return (1 + nu * kappa) / (1 + kappa)
