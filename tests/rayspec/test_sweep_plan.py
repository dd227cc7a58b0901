"""Trials, their interleaving and their scores."""

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rayspec.farm.load import Traffic
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan import Drafter, inspect_drafter, make_plan
from rayspec.sweep.prepare import prepare
from rayspec.sweep.results import TrialResult, score

DRAFTERS = [Drafter(label=name, path=f"/{name}", head={"kind": "full"}) for name in ("full", "a", "b")]


def config(**fields: object) -> SweepConfig:
    base: dict[str, object] = {"drafters": ["full", "a", "b"], "draft_steps": [2, 4], "concurrency": [1, 4]}
    return SweepConfig(**{**base, **fields})  # type: ignore[arg-type]


def test_every_trial_answers_every_block_in_its_phases() -> None:
    plan = make_plan(config(repeats=2, block_prompts=4), 10, DRAFTERS)
    assert len(plan.trials) == 2 + 2 * 2 * 3
    assert [p.draft_steps for p in plan.phases] == [2, 4]
    seen = Counter((t, r.prompt_block) for p in plan.phases for r in p.rounds for t in r.trials)
    assert set(seen.values()) == {2, 4}  # twice; plain decoding in both phases
    for trial in plan.trials:
        assert {seen[trial, b] for b in range(3)} == {4 if trial.drafter is None else 2}


def test_blocks_cover_the_prompts_once() -> None:
    plan = make_plan(config(block_prompts=4), 10, DRAFTERS)
    spans = {(r.first, r.last) for r in plan.phases[0].rounds}
    assert spans == {(0, 4), (4, 8), (8, 10)}


def test_a_round_pairs_all_trials_of_its_traffic_in_turning_order() -> None:
    plan = make_plan(config(block_prompts=1), 8, DRAFTERS)
    firsts: dict[Traffic, list[str]] = defaultdict(list)
    for phase in plan.phases:
        for r in phase.rounds:
            assert {t.traffic for t in r.trials} == {r.traffic}
            assert {t.draft_steps for t in r.trials} == {0, phase.draft_steps}
            assert len(r.trials) == 4
            firsts[r.traffic].append(r.trials[0].head)
    for heads in firsts.values():  # 8 blocks in each of 2 phases, 4 trials: each comes first as often as the others
        assert set(Counter(heads).values()) == {4}


def test_round_indices_are_unique() -> None:
    plan = make_plan(config(repeats=3), 12, DRAFTERS)
    indices = [r.index for p in plan.phases for r in p.rounds]
    assert indices == list(range(len(indices)))


def test_a_broken_checkpoint_is_a_problem_and_a_missing_one_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nonsense"]}')
    assert "architectures must be" in str(inspect_drafter(str(tmp_path)).problem)
    with pytest.raises(ValueError, match=r"no drafter 'slimspec-r63'.*full"):
        inspect_drafter("slimspec-r63")


def test_shipped_drafters_are_healthy() -> None:
    prepared = prepare(SweepConfig(drafters=["full", "slimspec-r32"], workload="heldout_python:4"))
    assert [d.problem for d in prepared.drafters] == [None, None]
    assert "slimspec-r32-s4-c1" in prepared.describe()


def test_scores_recover_the_synthetic_law(results: list[TrialResult]) -> None:
    by_name = {r.trial.name: r for r in results}
    slim, full = by_name["slimspec-r64-s4-c1"].metrics, by_name["full-s4-c1"].metrics
    assert full["speedup_vs_full"] == 1
    assert slim["nu"] == pytest.approx(260 / 900)
    assert slim["rho"] == pytest.approx(slim["tau"] / full["tau"])
    assert slim["speedup_vs_plain_ci_low"] < slim["speedup_vs_plain"] < slim["speedup_vs_plain_ci_high"]
    # without the engine's clock: four calls of the head timed alone, against the rest of the cycle
    head_ms = 4 * full["head_latency_us"] / 1e3
    assert full["kappa"] == pytest.approx(head_ms / (full["cycle_ms"] - head_ms))


def test_without_its_baseline_a_trial_keeps_its_own_numbers(results: list[TrialResult]) -> None:
    assert "speedup_vs_plain" not in next(r for r in results if r.trial.drafter is None).metrics
    trial = next(r.trial for r in results if r.trial.name == "full-s4-c1")
    (only,) = score(SweepConfig(), {}, {trial: "it broke"}, {})
    assert only.error == "it broke"
    assert only.metrics == {}
