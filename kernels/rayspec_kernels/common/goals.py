"""What the kernels are meant to reach on a card, held against what the suite timed there.

A goal is judged by its worst case; what was not timed is named as such and never counts as reached.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Timing = Mapping[str, Any]


class Goal(NamedTuple):
    """`ratios` gives (case, what it reached); a case reaches the goal with `at_least` so much."""

    text: str
    at_least: float
    ratios: Callable[[Sequence[Timing]], Iterator[tuple[str, float]]]


def named(t: Timing) -> str:
    return f"{t['op']} {t['variant']} {t['shape']} B={t['batch']}"


def _share_of_copy(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
    """Large matrices at B = 1. What moves less than 100 MB, 36 us of an H200's copy, is latency for a good part: of
    such calls of 10 MB or more 3 of 26 reached 0.8 there, of larger ones 20 of 31 (docs/results/h200)."""
    for t in timings:
        if t["batch"] == 1 and t["op"] != "grouped_rmsnorm" and t["bytes"] >= 1e8:
            yield named(t), t["floor_s"] / t["seconds"]


def _norm(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
    """The norm at the most rows: fewer than a training step's fit into the L2 cache or are all launch."""
    for t in timings:
        if t["op"] == "grouped_rmsnorm" and t["batch"] == 64:
            yield named(t), t["floor_s"] / t["seconds"]


def _full_heads_s(timings: Sequence[Timing]) -> dict[tuple[str, int], float]:
    """Seconds of the bf16 head by shape and batch: the fastest of our kernel and torch's, parts of it included."""
    return {(t["shape"], t["batch"]): min([t["seconds"], *t["rivals_s"].values()])
            for t in timings if t["op"] == "head_topk" and t["variant"] == "bf16"}  # fmt: skip


def _slim_against_full(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
    full = _full_heads_s(timings)
    for t in timings:
        is_plain = t["op"] == "slim_head" and t["variant"].endswith("bf16")
        if is_plain and t["batch"] in (1, 64) and (t["shape"], t["batch"]) in full:
            yield named(t), full[t["shape"], t["batch"]] / t["seconds"]


def _four_bits(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
    full = _full_heads_s(timings)
    for t in timings:
        if t["op"] == "head_topk" and t["variant"] == "int4" and t["batch"] == 1 and (t["shape"], 1) in full:
            yield named(t), full[t["shape"], 1] / t["seconds"]


def _against(op: str, rival: str) -> Callable[[Sequence[Timing]], Iterator[tuple[str, float]]]:
    def ratios(timings: Sequence[Timing]) -> Iterator[tuple[str, float]]:
        for t in timings:
            if t["op"] == op and rival in t["rivals_s"]:
                yield named(t), t["rivals_s"][rival] / t["seconds"]

    return ratios


GOALS = (
    Goal("large matrices at B = 1: share of the copy's bandwidth", 0.8, _share_of_copy),
    Goal("slim_head with r = H / 8 at B = 1 and 64: times faster than the full head", 5, _slim_against_full),
    Goal("indexed_head: at most 1.10 times the product with a trimmed head", 1 / 1.1,
         _against("indexed_head", "product with trimmed head")),
    Goal("indexed_head: times faster than gathering, then the product", 1, _against("indexed_head", "gather, product")),
    Goal("head_topk: times faster than the product, then top-k", 1.3, _against("head_topk", "product, top-k")),
    Goal("head_topk in int4 at B = 1: times faster than in bf16", 3, _four_bits),
    Goal("grouped_rmsnorm: share of the copy's bandwidth", 0.95, _norm),
)  # fmt: skip


def goals_table(timings: Sequence[Timing]) -> list[str]:
    """Markdown, one row a goal: what its worst case reached, and how many of its cases reach the goal."""
    rows = ["| goal | at least | worst case | is | reached by |", "|---|--:|---|--:|--:|"]
    for goal in GOALS:
        found = sorted(goal.ratios(timings), key=lambda case: case[1])
        if not found:
            rows.append(f"| {goal.text} | {goal.at_least:.2f} | not timed | | |")
            continue
        reached = sum(ratio >= goal.at_least for _, ratio in found)
        case, worst = found[0]
        rows.append(f"| {goal.text} | {goal.at_least:.2f} | {case} | {worst:.2f} | {reached} of {len(found)} |")
    return rows
