"""Trials, their interleaving and their scores."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_models import DRAFTERS as DRAFTERS_OF
from fixture_models import PROMPTS, TARGET, drafter_folder

from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, Measured, RequestRecord
from rayspec.statistics import Interval
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import EarlyStopConfig, SearchConfig, StopConfig, SweepConfig
from rayspec.sweep.measure.stopping import hopeless, is_finished
from rayspec.sweep.plan.drafters import inspect_drafter
from rayspec.sweep.plan.prepare import prepare
from rayspec.sweep.plan.trials import Plan, Round, Trial, make_plan
from rayspec.sweep.record.results import TrialResult, score, speedups
from rayspec.sweep.shape import DraftShape

FAMILIES = ("full", "slimspec-r32", "specformer", "medusa", "hydra")


def candidates(*names: str, **fields: object) -> list[Candidate]:
    """With the draft steps of `config`."""
    return [
        Candidate(label=n, path=f"/{n}", head=Head(kind="full"), draft_steps=s, **fields)  # type: ignore[arg-type]
        for s in (2, 4)
        for n in names
    ]


DRAFTERS = candidates("full", "a", "b")


def config(**fields: object) -> SweepConfig:
    base: dict[str, object] = {"drafters": ["full", "a", "b"], "draft_steps": [2, 4], "concurrency": [1, 4]}
    return SweepConfig(**{**base, **fields})  # type: ignore[arg-type]


def real_config(**fields: object) -> SweepConfig:
    drafters = [str(DRAFTERS_OF[kind]) for kind in ("full", "slimspec")]
    return SweepConfig(target=str(TARGET), drafters=drafters, **fields)  # type: ignore[arg-type]


def all_rounds(plan: Plan) -> list[Round]:
    return [r for c in plan.cohorts for p in range(plan.max_passes) for r in plan.rounds(c, p)]


def test_every_trial_answers_every_block_in_its_cohort() -> None:
    plan = make_plan(config(repeats=2, block_prompts=4), 10, DRAFTERS)
    assert len(plan.trials) == 2 + 2 * 2 * 3
    assert [c.name for c in plan.cohorts] == ["s2", "s4"]
    seen = Counter((t, r.prompt_block) for r in all_rounds(plan) for t in r.trials)
    assert set(seen.values()) == {2, 4}  # twice; plain decoding in both cohorts
    for trial in plan.trials:
        assert {seen[trial, b] for b in range(3)} == {4 if trial.candidate is None else 2}
    assert plan.num_blocks == sum(seen.values())


def test_blocks_cover_the_prompts_once() -> None:
    plan = make_plan(config(block_prompts=4), 10, DRAFTERS)
    assert {(r.first, r.last) for r in plan.rounds(plan.cohorts[0], 0)} == {(0, 4), (4, 8), (8, 10)}


def test_a_round_pairs_all_trials_of_its_traffic_in_turning_order() -> None:
    plan = make_plan(config(block_prompts=1), 8, DRAFTERS)
    firsts: dict[Traffic, list[str]] = defaultdict(list)
    for cohort in plan.cohorts:
        for r in plan.rounds(cohort, 0):
            assert {t.traffic for t in r.trials} == {r.traffic}
            assert {t.draft_steps for t in r.trials} == {0, cohort.draft_steps}
            assert len(r.trials) == 4
            firsts[r.traffic].append(r.trials[0].label)
    for heads in firsts.values():  # 8 blocks in each of 2 cohorts, 4 trials: each comes first as often as the others
        assert set(Counter(heads).values()) == {4}


def test_round_indices_are_unique() -> None:
    indices = [r.index for r in all_rounds(make_plan(config(repeats=3), 12, DRAFTERS))]
    assert indices == list(range(len(indices)))


def test_all_passes_that_there_may_be_are_planned() -> None:
    assert make_plan(config(stop=StopConfig(ci_width=0.1, max_repeats=5)), 10, DRAFTERS).max_passes == 5
    assert make_plan(config(), 10, DRAFTERS).max_passes == 1


def test_small_cohorts_each_hold_plain_decoding_and_the_baseline() -> None:
    plan = make_plan(config(search=SearchConfig(candidates_per_cohort=1)), 4, DRAFTERS)
    assert [c.name for c in plan.cohorts] == ["s2-a", "s2-b", "s4-a", "s4-b"]
    for cohort in plan.cohorts:
        assert {t.label for t in cohort.trials} == {"plain", "full", cohort.name[-1]}
    indices = [r.index for r in all_rounds(plan)]
    assert len(set(indices)) == len(indices)


def test_drafters_of_another_family_stand_against_plain_decoding_alone() -> None:
    others = [c for name in ("MEDUSA", "HYDRA") for c in candidates(name, algorithm=name)]
    plan = make_plan(config(), 4, [*DRAFTERS, *others])
    assert [c.name for c in plan.cohorts] == ["s2-eagle3", "s2-last_hidden", "s4-eagle3", "s4-last_hidden"]
    heads = [{t.label for t in c.trials} for c in plan.cohorts]
    assert heads == [{"plain", "full", "a", "b"}, {"plain", "MEDUSA", "HYDRA"}] * 2
    indices = [r.index for r in all_rounds(plan)]
    assert len(set(indices)) == len(indices)


def test_another_body_is_another_engine() -> None:
    """Which SGLang builds its model for; nothing but plain decoding is measured beside both."""
    wide = candidates("wide", "wider", body="wide")
    plan = make_plan(config(draft_steps=[2]), 4, [*DRAFTERS, *wide])
    assert {c.name: [d.label for d in c.candidates] for c in plan.cohorts} == {
        "s2-eagle3": ["full", "a", "b"],
        "s2-eagle3-2": ["wide", "wider"],
    }
    assert len({c.engine for c in plan.cohorts}) == 2
    real = [inspect_drafter(str(drafter_folder(name)), config())[0] for name in FAMILIES]
    assert real[0].engine == real[1].engine
    assert real[3].engine == real[4].engine == ("last_hidden", None, 2)
    assert len({c.engine for c in real}) == 3


def test_a_drafter_in_several_shapes_is_a_trial_of_each_and_each_shape_an_engine() -> None:
    full, slim = (str(DRAFTERS_OF[kind]) for kind in ("full", "slimspec"))
    entries = [full, f"{full}@8x20", f"{slim}@8x20", f"{full}@4x9"]
    own = config(drafters=entries, draft_steps=[3], concurrency=[1])
    drafters = [c for entry in entries for c in inspect_drafter(entry, own)]
    assert {d.label: (d.shape.topk, d.num_draft_tokens) for d in drafters} == {
        "full": (1, 4),
        "full@8x20": (8, 20),
        "slimspec-r32@8x20": (8, 20),
        "full@4x9": (4, 9),
    }
    assert len({d.path for d in drafters}) == 2
    plan = make_plan(own, 4, drafters)
    assert {c.name: [d.label for d in c.candidates] for c in plan.cohorts} == {
        "s3-eagle3": ["full"],
        "s3-eagle3-8x20": ["full@8x20", "slimspec-r32@8x20"],
        "s3-eagle3-4x9": ["full@4x9"],
    }


def test_a_chain_beside_a_sweep_of_trees() -> None:
    full = str(DRAFTERS_OF["full"])
    own = config(drafters=[full, f"{full}@chain"], draft_steps=[3], topk=4, num_draft_tokens=9)
    assert [c.worker for entry in own.drafters for c in inspect_drafter(entry, own)] == ["eagle3-4x9", "eagle3"]


def test_a_search_measures_some_of_the_cohorts_one_candidate_in_each() -> None:
    plan = make_plan(config(search=SearchConfig(algorithm="random", samples=3)), 8, DRAFTERS)
    assert (len(plan.cohorts), plan.num_cohorts) == (4, 3)
    assert plan.num_blocks == 3 * 6 * 2  # cohorts, arms under either traffic, blocks


def test_a_drafter_with_a_problem_is_a_trial_of_no_cohort() -> None:
    plan = make_plan(config(), 4, [*DRAFTERS, *candidates("c", problem="broken")])
    assert "c-s2-c1" in [t.name for t in plan.trials]
    assert all(t.label != "c" for c in plan.cohorts for t in c.trials)


def test_open_loop_trials_stand_beside_the_closed_ones() -> None:
    plan = make_plan(config(concurrency=[1], request_rate=[2.5]), 4, DRAFTERS)
    assert {t.name for t in plan.trials if t.label in ("plain", "a")} == {
        *("plain-c1", "plain-r2.5", "a-s2-c1", "a-s2-r2.5", "a-s4-c1", "a-s4-r2.5")
    }


@pytest.mark.parametrize(
    ("passes", "widths", "spent_s", "is_over"),
    [
        (1, [0.01], 0, False),  # fewer than `repeats`
        (2, [0.01, 0.04], 0, True),
        (2, [0.01, 0.06], 0, False),
        (2, [], 0, True),  # every trial has failed
        (4, [0.01], 0, False),  # no look planned: the level of the intervals does not allow for one
        (5, [0.01], 0, True),
        (3, [9.0], 100, True),
        (1, [9.0], 100, False),  # the first `repeats` are made in any case
        (8, [9.0], 0, True),
    ],
)
def test_passes_end(passes: int, widths: list[float], spent_s: float, is_over: bool) -> None:
    rule = config(repeats=2, stop=StopConfig(ci_width=0.05, max_repeats=8, max_seconds=100))
    assert rule.looks() == [2, 3, 5, 8]
    intervals = [Interval(value=2.0, low=2.0, high=2.0 + 2.0 * w) for w in widths]
    assert is_finished(rule, passes, intervals, spent_s >= 100) == is_over


def test_only_who_is_clearly_slower_than_the_best_is_given_up() -> None:
    rule = config(repeats=9, search=SearchConfig(early_stop=EarlyStopConfig(grace_passes=2)))
    assert rule.milestones() == [2, 6]
    assert rule.looks() == [2, 6, 9]
    traffic = Traffic(concurrency=1)
    full, a, b = (Trial(candidate=c, traffic=traffic) for c in DRAFTERS if c.draft_steps == 2)
    found = {
        full: Interval(value=1.0, low=0.9, high=1.1),
        a: Interval(value=1.4, low=1.2, high=1.6),
        b: Interval(value=1.1, low=1.0, high=1.19),
    }
    assert hopeless(rule, 2, found) == [b]  # the baseline stays
    assert hopeless(rule, 3, found) == []  # no look planned
    assert hopeless(rule, 6, {**found, b: Interval(value=1.1, low=1.0, high=1.21)}) == []
    assert hopeless(rule, 6, {**found, b: Interval(value=1.1)}) == []  # too few blocks for an interval


def test_an_interval_that_cannot_be_is_refused_before_the_sweep() -> None:
    with pytest.raises(ValueError, match=r"stop.ci_width needs .*; 8 prompts .*=4 are 2 .* at least 4 blocks"):
        prepare(real_config(workload=f"{PROMPTS}:8", stop=StopConfig(ci_width=0.1)))


def test_a_plan_says_that_there_will_be_no_interval() -> None:
    few = prepare(real_config(workload=f"{PROMPTS}:8", block_prompts=4)).describe()
    assert "warning: speed-ups will have no confidence interval; 8 prompts in blocks of block_prompts=4 are 2" in few
    assert "interval" not in prepare(real_config(workload=f"{PROMPTS}:8", block_prompts=2)).describe()


def test_in_an_open_loop_the_speed_up_is_that_of_latency(make_request: Callable[..., RequestRecord]) -> None:
    """Twice as fast from arrival to the last token; the arrivals make the walls equal."""
    traffic = Traffic(request_rate=1.0)
    plain = Trial(candidate=None, traffic=traffic)
    drafted = Trial(candidate=DRAFTERS[0], traffic=traffic)
    blocks: dict[Trial, list[BlockRecord]] = {plain: [], drafted: []}
    for b in range(6):
        for trial, scale in ((plain, 2.0), (drafted, 1.0)):
            request = make_request(f"{b}", (), 0.01 * scale, ttft_s=0.01 * scale)
            measured = Measured(wall_s=5.0, requests=(request,))
            blocks[trial].append(BlockRecord(index=b, prompt_block=b, measured=measured))
    found = speedups(config(concurrency=[], request_rate=[1.0]), drafted, blocks, {})
    assert found["plain"].value == pytest.approx(2.0)
    assert found["baseline"].value == pytest.approx(1.0)
    closed = {replace(t, traffic=Traffic(concurrency=1)): b for t, b in blocks.items()}
    same = speedups(config(), replace(drafted, traffic=Traffic(concurrency=1)), closed, {})
    assert same["plain"].value == pytest.approx(1.0)  # equal tokens in equal walls


def test_a_broken_checkpoint_is_a_problem_and_a_missing_one_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nonsense"]}')
    assert "architectures must be" in str(inspect_drafter(str(tmp_path), SweepConfig())[0].problem)
    with pytest.raises(ValueError, match="no drafter 'slimspec-r63': neither one of target smollm2-135m"):
        inspect_drafter("slimspec-r63", SweepConfig())


def test_healthy_drafters_have_no_problem() -> None:
    prepared = prepare(real_config(workload=f"{PROMPTS}:4"))
    assert [c.problem for c in prepared.plan.candidates] == [None, None]
    assert "slimspec-r32-s4-c1" in prepared.describe()


def test_scores_recover_the_synthetic_distribution(results: list[TrialResult]) -> None:
    by_name = {r.trial.name: r for r in results}
    slim, full = by_name["slimspec-r64-s4-c1"].metrics, by_name["full-s4-c1"].metrics
    assert full["speedup_vs_baseline"] == 1
    assert slim["nu"] == pytest.approx(260 / 900)
    assert slim["rho"] == pytest.approx(slim["tau"] / full["tau"])
    assert slim["speedup_vs_plain_ci_low"] < slim["speedup_vs_plain"] < slim["speedup_vs_plain_ci_high"]
    # without the engine's clock: four calls of the head timed alone, against the rest of the cycle
    head_ms = 4 * full["head_latency_us"] / 1e3
    assert full["kappa"] == pytest.approx(head_ms / (full["cycle_ms"] - head_ms))


@pytest.mark.parametrize("baseline", ["full", "full@8x32"])
def test_a_drafter_is_compared_with_the_baseline_in_its_own_shape(
    baseline: str, make_request: Callable[..., RequestRecord]
) -> None:
    tree = DraftShape(topk=8, num_draft_tokens=32)
    drafters = [c for name in ("full@8x32", "slim@8x32") for c in candidates(name, shape=tree)]
    if baseline == "full":
        drafters += candidates("full")
    sweep = config(drafters=[d.label for d in drafters if d.draft_steps == 2], baseline=baseline)
    plan = make_plan(replace(sweep, search=SearchConfig(candidates_per_cohort=1)), 4, drafters)
    with_slim = [labels for c in plan.cohorts if "slim@8x32" in (labels := {t.label for t in c.trials})]
    assert with_slim == [{"plain", "full@8x32", "slim@8x32"}] * 2  # draft steps
    trials = [Trial(candidate=c, traffic=Traffic(concurrency=1)) for c in drafters if c.draft_steps == 2]
    request = make_request("a", (0, 4), 0.01, ttft_s=0.01)
    record = BlockRecord(index=0, prompt_block=0, measured=Measured(wall_s=1.0, requests=(request,)))
    found = {r.trial.label: r for r in score(sweep, {t: [record] for t in trials}, {}, {})}
    assert found["slim@8x32"].metrics["speedup_vs_baseline"] == found["full@8x32"].metrics["rho"] == 1
    assert found["full@8x32"].is_baseline
    assert not found["slim@8x32"].is_baseline


def test_without_its_baseline_a_trial_keeps_its_own_numbers(results: list[TrialResult]) -> None:
    assert "speedup_vs_plain" not in next(r for r in results if r.trial.candidate is None).metrics
    trial = next(r.trial for r in results if r.trial.name == "full-s4-c1")
    (only,) = score(SweepConfig(), {}, {trial: "it broke"}, {})
    assert only.error == "it broke"
    assert only.metrics == {}
