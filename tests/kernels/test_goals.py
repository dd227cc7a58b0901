"""Goals find the cases that they speak of, and judge by the worst of them."""

from typing import Any

import pytest

from rayspec_kernels.common.ahead import cases
from rayspec_kernels.common.bench import Case
from rayspec_kernels.common.goals import GOALS, goals_table, named
from rayspec_kernels.common.shapes import BATCHES, MODELS

FLOOR_S = 1e-5


def as_timed(case: Case, seconds: float, rivals_s: float) -> dict[str, Any]:
    return {"op": case.op, "shape": case.shape, "batch": case.batch, "variant": case.variant, "bytes": case.bytes,
            "seconds": seconds, "floor_s": FLOOR_S, "rivals_s": dict.fromkeys(case.rivals, rivals_s)}  # fmt: skip


@pytest.fixture(scope="module")
def suite_cases() -> list[Case]:
    ops = ("head_topk", "slim_head", "indexed_head", "gather_dot", "router_topk", "grouped_rmsnorm", "slim_posterior")
    return list(cases(ops, MODELS, BATCHES))


def test_every_goal_finds_cases_of_each_model(suite_cases: list[Case]) -> None:
    timings = [as_timed(case, 1e-5, 1e-4) for case in suite_cases]
    for goal in GOALS:
        names = [name for name, _ in goal.ratios(timings)]
        assert names, goal.text
        assert all(any(shape.name in name for name in names) for shape in MODELS), goal.text


def test_latency_is_not_held_against_bandwidth(suite_cases: list[Case]) -> None:
    timings = [as_timed(case, 1e-5, 1e-4) for case in suite_cases]
    names = [name for name, _ in GOALS[0].ratios(timings)]
    assert not any(name.startswith("slim_posterior") for name in names)
    assert not any(name.startswith("gather_dot n=2048, bf16 Llama-3.1-8B B=1") for name in names), "17 MB"
    assert any(name.startswith("slim_head r=512, bf16 Llama-3.1-8B B=1") for name in names), "136 MB"
    least = min(t["bytes"] for t in timings if named(t) in names)
    assert least >= 1e8 > max(t["bytes"] for t in timings if t["batch"] == 1 and t["bytes"] < least)
    norms = [name for name, _ in GOALS[-1].ratios(timings)]
    assert norms
    assert all(name.startswith("grouped_rmsnorm") and name.endswith("B=64") for name in norms)


@pytest.mark.parametrize(("slow_s", "expected"), [(8e-5, "1.25 | 2 of 3"), (2e-5, "5.00 | 3 of 3")])
def test_the_worst_case_is_shown(suite_cases: list[Case], slow_s: float, expected: str) -> None:
    """The full head takes 100 us everywhere; one low-rank head is slow."""
    timings = []
    for case in suite_cases:
        if case.batch == 1 and case.op in ("head_topk", "slim_head"):
            is_slow = case.op == "slim_head" and case.shape == MODELS[1].name
            seconds = 1e-4 if case.op == "head_topk" else slow_s if is_slow else 1e-5
            timings.append(as_timed(case, seconds, 1e-4))
    row = next(row for row in goals_table(timings) if "slim_head with r" in row)
    assert row.endswith(f"| slim_head r=256, bf16 Qwen3-30B-A3B B=1 | {expected} |")


def test_what_was_not_timed_is_not_reached() -> None:
    rows = goals_table([])[2:]
    assert len(rows) == len(GOALS)
    assert all("not timed" in row for row in rows)
