"""The choice of a draft length from measured costs and from what was accepted; no engine."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from policy_cases import table, write_policy

from sglang_ext.policy.acceptance import Acceptance
from sglang_ext.policy.choice import MeasuredPolicy
from sglang_ext.policy.table import CostCurve, PolicyTable, read_table
from sglang_ext.settings import build

K = 4


def policy(start: int = K, **values: Any) -> MeasuredPolicy:
    """Drafts cost nearly nothing for one request, and more than they can bring for 32."""
    curves = [
        {"draft_steps": k, "requests": [1, 32], "step_ms": [10.0 + 1.5 * k, 20.0 + 30.0 * k]} for k in (0, 1, 2, K)
    ]
    values = {"curves": curves, "accepted_if_reached": [0.7] * K} | values
    return MeasuredPolicy(build(PolicyTable, table([0, K]) | values), start=start)


def these(*is_drafted: bool, first: int = 0) -> dict[int, bool]:
    """Requests by number, from `first` on."""
    return dict(enumerate(is_drafted, first))


def run(
    policy: MeasuredPolicy, steps: int, requests: int, chance: float, seed: int = 0, answer_steps: int = 20
) -> list[int]:
    """The lengths of as many steps, of which each draft is accepted with a chance; all requests are new after each
    `answer_steps`."""
    draw, lengths = random.Random(seed), []
    for step in range(steps):
        first = (seed << 40) + step // answer_steps * requests
        k = policy.choose(these(*[True] * requests, first=first)).draft_steps
        lengths.append(k)
        policy.see([next((i for i in range(k) if draw.random() > chance), k) for _ in range(requests)])
    return lengths


def test_costs_between_and_beyond_the_measured_loads() -> None:
    curve = CostCurve(draft_steps=2, requests=[2, 4, 8], step_ms=[10.0, 12.0, 20.0])
    assert [curve.at(n) for n in (1, 2, 3, 4, 6, 8, 10)] == [10, 10, 11, 12, 16, 20, 24]
    falling = CostCurve(draft_steps=2, requests=[2, 4], step_ms=[10.0, 8.0])
    assert [falling.at(n) for n in (3, 100)] == [9, 8]  # noise must not make a crowd free
    assert CostCurve(draft_steps=0, requests=[4], step_ms=[3.0]).at(64) == 3


def seen(*accepted: int, first: int = 0) -> list[tuple[int, int]]:
    return list(enumerate(accepted, first))


def test_acceptance_by_hand() -> None:
    """Of requests that are so alike that what one accepts says nothing of itself."""
    alike: Any = {"prior_verifications": 4, "concentration": 1e9}
    found = Acceptance([0.5, 0.25], half_life_steps=1, **alike)
    assert found.shares() == [0.5, 0.25]
    assert found.tokens(2) == 1 + 0.5 + 0.125
    found.see(2, seen(2, 1, 0))  # reached: 3 and 2; accepted: 2 and 1. What was known weighs 4 at least
    assert found.shares() == [(2 + 2) / (4 + 3), (1 + 1) / (4 + 2)]
    found.see(1, seen(*[1] * 5, first=3))  # of the 7 and 6 before 4 are left; the second position was not drafted
    assert found.shares() == pytest.approx([(4 * 4 / 7 + 5) / (4 + 5), 2 / 6])
    assert found.tokens(2, 0) == pytest.approx(found.tokens(2))
    found.see(0, seen(0, first=8))
    found.see(2, seen(2, first=8))
    assert found.shares()[1] == pytest.approx((4 * 2 / 6 + 1) / (4 + 1))
    slow = Acceptance([0.5], half_life_steps=2, **alike)
    slow.see(1, seen(*[1] * 12))
    slow.see(0, seen(0))
    slow.see(0, seen(0))
    slow.see(1, seen(0, 0, first=12))  # half of the 16 are left, less what a third step takes
    assert slow.shares() == [pytest.approx(14 * 0.5**1.5 / (16 * 0.5**1.5 + 2))]


def test_a_request_s_own_acceptance_by_hand() -> None:
    found = Acceptance([0.5, 0.5], prior_verifications=4, half_life_steps=10**9, concentration=2)
    for _ in range(3):
        found.see(2, [("poor", 0), ("good", 2)])
    says = 6 / 6 + 6 / 12 + 6 / 20  # c (c + 1) / ((c + n) (c + n + 1)) for n = 0, 1, 2
    assert says == pytest.approx(3 * 3 / (2 + 3))
    first = (4 * 0.5 + says) / (4 + 2 * says)
    second = (4 * 0.5 + says) / (4 + says)
    assert found.shares() == pytest.approx([first, second])
    assert found.tokens(1) == found.tokens(1, "new") == pytest.approx(1 + first)
    assert found.tokens(1, "poor") == pytest.approx(1 + 2 * first / (2 + 3))
    assert found.tokens(1, "good") == pytest.approx(1 + (2 * first + 3) / (2 + 3))
    assert found.tokens(2, "poor") == pytest.approx(1 + 2 * first / 5 * (1 + second)), "none got to the second draft"
    found.keep(["good"])
    assert found.tokens(1, "poor") == found.tokens(1)
    assert found.tokens(1, "good") > found.tokens(1)


def test_the_length_follows_the_load() -> None:
    found = policy()
    assert set(run(found, 50, 1, 0.9)) == {K}
    assert set(run(found, 50, 32, 0.9)[4:]) == {0}
    assert set(run(found, 50, 1, 0.9)[4:]) == {K}
    assert found.switches == 2


def test_the_length_follows_what_is_accepted() -> None:
    found = policy(half_life_steps=100)
    bad = run(found, 4000, 1, 0.0)
    tried = [i for i in range(1, 4000) if bad[i] > 0 and bad[i - 1] == 0]
    assert len(tried) >= 2, "it comes back to try again"
    assert sum(k > 0 for k in bad) < 100, "for few steps"
    good = run(found, 4000, 1, 0.8)
    assert sum(k > 1 for k in good) > 2500


def test_a_prior_that_is_too_low_is_found_out() -> None:
    assert sum(k > 0 for k in run(policy(accepted_if_reached=[0.05] * K), 2000, 1, 0.9)) > 1500


def test_poor_requests_do_not_end_all_drafting() -> None:
    """Drafts bring 1.2 of plain decoding on the whole, where half of the requests accept nearly none of them."""
    draw, shares = random.Random(0), [0.52, 0.86, 0.88, 0.89]
    costs = [{"draft_steps": k, "requests": [1], "step_ms": [10.0 + 2.5 * k]} for k in (0, K)]
    found, lengths = policy(curves=costs, accepted_if_reached=shares), []
    for _ in range(200):
        lengths += run(found, 30, 1, draw.choice((0.1, 0.95)), seed=draw.randrange(1000))
    assert lengths.count(K) > 0.9 * len(lengths)


@pytest.mark.parametrize("steps", [80, 500])
def test_one_poor_request_does_not_end_the_drafting_of_the_next(steps: int) -> None:
    """It is decoded plainly itself as soon as it shows, but for tries."""
    costs = [{"draft_steps": k, "requests": [1], "step_ms": [37.0 if k == 0 else 47.0]} for k in (0, 2)]
    found = policy(start=2, curves=costs, accepted_if_reached=[0.43, 0.47], rest_after_steps=8)
    poor = run(found, steps, 1, 0.0, answer_steps=steps)
    assert poor[0] == 2
    assert poor[:80].count(2) < 24
    assert poor.count(2) < 60
    assert set(run(found, 20, 1, 0.6, seed=1)) == {2}


def test_what_is_chosen_for_many_is_the_mean_of_what_each_promises() -> None:
    costs = [{"draft_steps": k, "requests": [2], "step_ms": [10.0 if k == 0 else 14.0]} for k in (0, 1)]
    found = policy(start=1, curves=costs, accepted_if_reached=[0.5], dwell_steps=1, request_concentration=4.0)
    for _ in range(40):
        found.choose(these(True, True))
        found.see([1, 0] if found.choice.draft_steps else [0, 0])
    good, poor = (found.acceptance.tokens(1, n) for n in (0, 1))
    assert good > 1.85
    assert poor < 1.15
    both = found.choose(these(True, True))
    assert found.rates[1] == pytest.approx((good + poor) / 2 / 14.0)
    assert both.draft_steps == 1, "1.5 tokens for 1.4 times the time"
    found.see([1, 0])
    costs[1]["step_ms"] = [16.0]
    other = policy(start=1, curves=costs, accepted_if_reached=[0.5], dwell_steps=1)
    other.acceptance, other._untried_ms = found.acceptance, 0.0  # no try is due
    assert other.choose(these(True, True)).draft_steps == 0
    assert other.choose({0: True}).draft_steps == 1, "the good one alone"


def flat(step_ms: float, **values: Any) -> MeasuredPolicy:
    """One draft length, of which nothing is expected."""
    costs = [{"draft_steps": k, "requests": [1, 32], "step_ms": [10.0 if k == 0 else step_ms] * 2} for k in (0, K)]
    return policy(start=0, curves=costs, **({"accepted_if_reached": [0.0] * K} | values))


def test_tries_cost_what_they_may() -> None:
    lengths = run(flat(20.0, try_cost=0.01, prior_verifications=1e6), 20_000, 1, 0.0)
    drafted = lengths.count(K)
    assert 0.008 < drafted * (20.0 - 10.0) / (lengths.count(0) * 10.0) < 0.011
    assert lengths[:8] == [K] * 8, "the first comes at once"
    assert sum(a < b for a, b in pairwise(lengths)) == drafted / 8 - 1


def test_a_draft_that_cannot_pay_is_not_tried() -> None:
    assert set(run(flat(50.1), 5000, 1, 1.0)) == {0}  # 5 tokens at most in 5.01 plain steps
    assert K in run(flat(49.9), 5000, 1, 1.0)


def test_a_try_waits_for_requests_that_the_drafter_has_followed() -> None:
    found = flat(20.0, rest_after_steps=2, accepted_if_reached=[0.3] * K)
    for _ in range(3):
        choice = found.choose(these(*[False] * 4))
    assert (choice.draft_steps, choice.keeps_up) == (0, False), "none of them will be"
    found._untried_ms = 50.0 / found.table.try_cost  # 46 ms are lost where all are drafted for, 63 where half are
    choice = found.choose(these(True, False, False, False))
    assert (choice.draft_steps, choice.keeps_up) == (0, True), "more will come"
    assert found.choose(these(True, True, False, False)).draft_steps == 0, "half of them cost more than it may"
    assert [found.choose(these(*[True] * 4)).draft_steps for _ in range(12)] == [K] * 8 + [0] * 4
    assert not found.choice.keeps_up
    found._untried_ms = 1e6
    assert found.choose(these(True, True, False, False)).draft_steps == K, "after a longer wait"


def test_a_longer_draft_must_promise_more_by_a_margin() -> None:
    costs = [{"draft_steps": k, "requests": [1], "step_ms": [10.0 + 5 * k]} for k in (0, 1)]

    def first(start: int, margin: float, share: float) -> int:
        found = policy(start=start, margin=margin, curves=costs, accepted_if_reached=[share])
        found._untried_ms = 0.0  # no try is due
        return found.choose(these(True)).draft_steps

    assert first(start=0, margin=0.02, share=0.51) == 0  # 0.7% more than plain decoding
    assert first(start=1, margin=0.02, share=0.51) == 1
    assert first(start=0, margin=0.0, share=0.51) == 1
    assert first(start=1, margin=0.02, share=0.499) == 0


def test_a_length_stays_for_some_steps() -> None:
    found = policy(dwell_steps=5)
    chosen = [found.choose(these(*[True] * (1, 32)[i % 2])).draft_steps for i in range(40)]
    held = [i for i in range(1, 40) if chosen[i] != chosen[i - 1]]
    assert held
    assert all(b - a >= 5 for a, b in pairwise(held))


def test_the_drafter_rests_where_no_draft_would_pay_and_wakes_before_one_does() -> None:
    found = policy(rest_after_steps=3)
    assert [found.choose(these(*[True] * 32)).keeps_up for _ in range(8)] == [True] * 2 + [False] * 6
    # one request that was there while the drafter rested is left: a draft would pay, but not for it
    choice = found.choose(these(False))
    assert (choice.draft_steps, choice.keeps_up) == (0, True)
    for _ in range(4):
        choice = found.choose(these(True))
    assert choice.draft_steps == K


def test_requests_with_holes_are_no_evidence() -> None:
    found = policy()
    before = found.acceptance.shares()
    found.choose(these(False, False))
    found.see([0, 0])
    assert found.acceptance.shares() == before
    found = policy()
    k = found.choose(these(True, True, True, False)).draft_steps
    found.see([k, k, k, 0])
    assert k > 0
    assert found.acceptance.shares()[0] > 0.72


def test_late_results_are_those_of_their_own_steps() -> None:
    """With overlapping steps a result comes when the next lengths are already chosen."""
    found = policy(accepted_if_reached=[0.9] * K, prior_verifications=1.0, dwell_steps=1)
    first = found.choose(these(True)).draft_steps
    found.choose(these(*[True] * 32))
    assert (first, found.choose(these(*[True] * 32)).draft_steps) == (K, 0)
    found.see([1])
    assert found.acceptance.shares()[0] > 0.9
    assert found.acceptance.shares()[1] < 0.5
    found.see([0] * 32)  # of a step without drafts: nothing was refused
    assert found.acceptance.shares()[0] > 0.9
    found.see([0])
    assert found.lost == 1


def test_a_request_is_known_until_its_last_result_and_no_longer() -> None:
    found = policy(dwell_steps=1)
    for _ in range(20):
        found.choose({"ends": True, "stays": True})
        found.see([0, K])
    known = found.acceptance.tokens(1, "ends")
    assert known < found.acceptance.tokens(1) < found.acceptance.tokens(1, "stays")
    found.choose({"ends": True, "stays": True})  # its result is late
    found.choose({"stays": True})
    before = found.acceptance.shares()[0]
    found.see([0, K])
    assert found.acceptance.tokens(1, "ends") < known, "one more of a request that was known"
    assert abs(found.acceptance.shares()[0] - before) < 0.01, "its 21st verification says little of others"
    found.choose({"stays": True})
    assert found.acceptance.tokens(1, "ends") == found.acceptance.tokens(1)
    assert set(found.acceptance._own) == {"stays"}
    found.see([K])
    found.see([K])
    assert found.acceptance.tokens(1, "stays") > found.acceptance.tokens(1)
    assert found.lost == 0


def test_a_file_comes_back(tmp_path: Path) -> None:
    found = read_table(write_policy(tmp_path / "policy.json", [0, 2], about={"sweep_run_id": "x"}))
    assert found.lengths == [0, 2]
    assert found.step_ms(2, 1) == 18.0


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format_version": 2}, r"format_version must be 1, got 2; write the file anew"),
    "an unknown key": ({"curvs": []}, r"unknown key 'curvs'"),
    "a key of before there were tries": ({"retry_after_steps": 2000}, r"unknown key 'retry_after_steps'"),
    "no plain decoding": ({"curves": table([1, 2])["curves"]}, r"curves must be of draft_steps 0 .* got \[1, 2\]"),
    "nothing to draft": ({"curves": table([0, 1])["curves"][:1]}, r"at least one draft length, each once, got \[0\]"),
    "twice": ({"curves": table([0, 1])["curves"] * 2}, r"each once, got \[0, 1, 0, 1\]"),
    "a share of 2": ({"accepted_if_reached": [0.5, 2.0]}, r"accepted_if_reached must hold a share from 0 to 1"),
    "too few shares": ({"accepted_if_reached": [0.5]}, r"for each of 2 draft positions, got \[0.5\]"),
    "falling requests": (
        {"curves": [{"draft_steps": 0, "requests": [4, 1], "step_ms": [1.0, 1.0]}]},
        r"curves\[0\]\.requests must be ascending numbers in 1\.\.1048576, got \[4, 1\]",
    ),
    "no time": (
        {"curves": [{"draft_steps": 0, "requests": [1], "step_ms": [0.0]}]},
        r"step_ms must hold a time in 0\.0001\.\.1e\+08 ms for each of the 1 requests",
    ),
    "a million drafts": (
        {"curves": [{"draft_steps": 10**6, "requests": [1], "step_ms": [1.0]}]},
        r"draft_steps must be in 0 \(plain decoding\)\.\.1024, got 1000000",
    ),
    "more requests than there are": (
        {"curves": [{"draft_steps": 0, "requests": [1, 10**400], "step_ms": [1.0, 1.0]}]},
        r"requests must be ascending numbers in 1\.\.1048576",
    ),
    "times that no number holds the quotient of": (
        {"curves": [{"draft_steps": 0, "requests": [1, 2], "step_ms": [1e308, 1e-308]}]},
        r"step_ms must hold a time in 0\.0001",
    ),
    "a margin of 1": ({"margin": 1.0}, r"margin must be from 0 up to 1, got 1.0"),
    "tries for nothing": ({"try_cost": 0.0}, r"try_cost must be positive and at most 1e\+12, got 0.0"),
    "tries without end": ({"try_steps": 10**400}, r"try_steps must be positive and at most 1e\+12"),
    "no memory": ({"half_life_steps": 0}, r"half_life_steps must be positive and at most 1e\+12, got 0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_files_are_refused(fault: str, tmp_path: Path) -> None:
    values, message = BAD[fault]
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(table([0, 2]) | values))
    with pytest.raises(ValueError, match=rf"the policy .*policy\.json cannot be used: .*{message}"):
        read_table(file)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.json"
    file.write_text('{"margin": 0.5, ' + json.dumps(table([0, 2]) | {"margin": 0.02})[1:])
    with pytest.raises(ValueError, match=r"cannot be used: it holds 'margin' twice"):
        read_table(file)
