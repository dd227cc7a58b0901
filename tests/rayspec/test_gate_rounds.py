"""The gate's loop on sides whose times are known."""

import random
from collections.abc import Sequence
from itertools import islice
from math import log
from typing import Any

import numpy as np
import pytest
from gate_sides import Clock, FakeSide, conversations
from scipy import stats

from rayspec.gate.config import GateConfig
from rayspec.gate.decision import FALSE_ALARM, SAME_REPEATS, Verdict
from rayspec.gate.report import find, text
from rayspec.gate.rounds import Gate, orders
from rayspec.gate.sides import MeasureFailed


def gate_of(
    candidate: dict[str, Any],
    *,
    prompts: int = 64,
    has_tau: bool = True,
    noise: bool = True,
    coin: random.Random | None = None,
    **settings: Any,
) -> tuple[Gate, Clock, list[tuple[str, str]]]:
    clock, log = Clock(), []
    rng = np.random.default_rng(0) if noise else None
    sides = [FakeSide("a", clock, log, noise=rng), FakeSide("b", clock, log, noise=rng, **candidate)]
    config = GateConfig(**settings)
    return Gate(config, sides, conversations(prompts), has_tau=has_tau, clock=clock, coin=coin), clock, log


def test_rounds_are_a_b_b_a_or_b_a_a_b_over_every_prompt() -> None:
    gate, _, log = gate_of({}, speed_loss=1e-4, coin=random.Random(0))  # which no verdict ends
    gate.run(300)
    rounds = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert {"".join(side for side, _ in r) for r in rounds} == {"abba", "baab"}
    assert all(r[0][1] == r[1][1] != r[2][1] == r[3][1] for r in rounds)
    firsts = [prompt for r in rounds[:32] for _, prompt in r[::2]]
    assert sorted(firsts) == sorted(f"p{i}" for i in range(64)), "a pass takes every prompt once"


def test_the_order_of_the_prompts_is_the_seed_s_and_that_of_the_sides_the_coin_s() -> None:
    first, again, other, thrown = (
        list(islice(orders(8, seed, random.Random(coin)), 40)) for seed, coin in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert first == again
    assert [o[:2] for o in first] == [o[:2] for o in thrown] != [o[:2] for o in other]
    assert [o[2] for o in first] == [o[2] for o in other] != [o[2] for o in thrown]
    starts = [order[0] for _, _, order in islice(orders(8, 0, random.Random(0)), 400)]
    assert 160 < sum(starts) < 240


def sides_of(gate: Gate) -> list[list[int]]:
    return [[side for side, _, _ in round_] for round_ in gate.measured.rounds]


def thirty_throws() -> list[list[int]]:
    """The sides of a gate's first 30 rounds; of another gate where a false alarm ended it before."""
    for _ in range(10):
        gate, _, _ = gate_of({}, speed_loss=1e-4)
        gate.run(125)
        if len(found := sides_of(gate)) >= 30:
            return found[:30]
    raise AssertionError("ten gates in a row ended early")


def test_no_two_gates_have_the_same_throws() -> None:
    """By chance once in 2 ** 30."""
    assert thirty_throws() != thirty_throws()


class SlowAtBothEnds(FakeSide):
    """The first and the last block of a round take a tenth longer, whoever answers them."""

    def answer(self, prompts: Sequence[Any]) -> Any:
        self.seconds = 1.1 if len(self.log) % 4 in (0, 3) else 1.0
        return super().answer(prompts)


def test_what_the_places_of_a_round_cost_is_nobody_s() -> None:
    """A series of throws that is the same in each gate leans to one side: with one of seed 0 a third are alarms."""
    gates, alarms = 300, 0
    for i in range(gates):
        clock, log, noise = Clock(), [], np.random.default_rng(i)
        sides = [SlowAtBothEnds(label, clock, log, noise=noise) for label in "ab"]
        coin = random.Random(i)
        gate = Gate(GateConfig(), sides, conversations(96), has_tau=False, clock=clock, coin=coin)
        alarms += gate.run(120) is Verdict.REGRESSION
    assert alarms <= stats.binom.ppf(0.99, gates, FALSE_ALARM)


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"seconds": 1.01}, Verdict.PASS),
        ({"seconds": 1 / 0.95}, Verdict.REGRESSION),
        ({"seconds": 0.8}, Verdict.PASS),
        ({"change": lambda p: {"accepted_drafts": 9}}, Verdict.REGRESSION),
        ({"change": lambda p: {"accepted_drafts": 9 + (int(p[1:]) % 2)}}, Verdict.REGRESSION),  # 2.5%
        ({"change": lambda p: {"accepted_drafts": 9 + (int(p[1:]) % 10 > 0)}}, Verdict.PASS),  # 0.5%
        ({"change": lambda p: {"accepted_drafts": 12}}, Verdict.PASS),
    ],
    ids=["same", "1% slower", "5% slower", "faster", "tau -5%", "tau -2.5%", "tau -0.5%", "tau more"],
)
def test_verdicts(candidate: dict[str, Any], verdict: Verdict) -> None:
    gate, clock, _ = gate_of(candidate)
    assert gate.run(600) is verdict
    assert clock.now < 600


def test_a_candidate_ten_times_slower_is_found_before_the_time_is_over() -> None:
    gate, clock, _ = gate_of({"seconds": 10.0})
    assert gate.run(600) is Verdict.REGRESSION
    assert clock.now < 600
    said = text(find(gate, compares=True, seconds=clock.now))
    assert "+90" in said
    assert "verdict: regression" in said


def test_no_time_no_verdict_and_the_limit_holds() -> None:
    gate, clock, _ = gate_of({})
    assert gate.run(30) is Verdict.UNDECIDED
    assert clock.now <= 32, "a round takes four seconds, and none begins that would not fit"
    assert "\ntau: neither a loss nor that there is none could be shown" in text(find(gate, compares=True, seconds=30))


def test_greedy_tau_ends_with_the_workload() -> None:
    """Noise that hides the speed's verdict goes on; what tau is on this workload was known after one pass."""
    gate, _, _ = gate_of({"change": lambda p: {"accepted_drafts": 8 + int(p[1:]) % 5}}, prompts=32)
    gate.run(600)
    assert gate.tau is not None
    assert gate.tau.bounds is not None
    assert gate.tau.verdict is Verdict.PASS
    drawn, _, _ = gate_of({"change": lambda p: {"accepted_drafts": 8 + int(p[1:]) % 5}}, prompts=32, temperature=1.0)
    assert drawn.run(600) is Verdict.UNDECIDED, "32 prompts, whose answers are drawn"


@pytest.mark.parametrize("counting", ["both", "candidate"])
@pytest.mark.parametrize(
    ("accepted", "verdict"), [(10, Verdict.PASS), (8, Verdict.REGRESSION)], ids=["same", "tau -10%"]
)
def test_counts_of_blocks_judge_tau(counting: str, accepted: int, verdict: Verdict) -> None:
    """Four streams of a server that counts by block, beside one that counts by answer: 24 clusters of 96 prompts."""
    clock, log, noise = Clock(), [], np.random.default_rng(0)
    base = FakeSide("a", clock, log, noise=noise, counts_blocks=counting == "both")
    own = FakeSide("b", clock, log, noise=noise, counts_blocks=True, change=lambda p: {"accepted_drafts": accepted})
    gate = Gate(GateConfig(concurrency=4), [base, own], conversations(96), has_tau=True, clock=clock)
    assert gate.run(600) is verdict
    assert gate.tau is not None
    assert gate.tau.verdict is verdict
    assert len(gate.measured.counts.steps) == 24
    assert text(find(gate, compares=True, seconds=1)).count("over 96 prompts") == 1


def test_greedy_answers_that_vary_are_a_sample() -> None:
    """As if a pass told tau, a third of these would be alarms."""
    gates, alarms = 300, 0
    for i in range(gates):
        clock, log, rng = Clock(), [], np.random.default_rng(i)
        change = lambda prompt, rng=rng: {"accepted_drafts": int(rng.integers(0, 21))}  # noqa: E731
        sides = [FakeSide(label, clock, log, change=change) for label in "ab"]
        gate = Gate(GateConfig(concurrency=4), sides, conversations(96), has_tau=True, clock=clock)
        gate.run(80)
        assert gate.tau is not None
        alarms += gate.tau.verdict is Verdict.REGRESSION
    assert alarms <= stats.binom.ppf(0.99, gates, FALSE_ALARM / 2)


def test_one_answer_that_varies_is_said_and_makes_tau_a_sample_s() -> None:
    calls = iter(range(10**6))

    def change(prompt: str) -> dict[str, object]:
        return {"accepted_drafts": 4 + int(prompt[1:]) % 13, "output": (next(calls),) if prompt == "p7" else (1,)}

    gate, clock, _ = gate_of({"change": change}, prompts=96, concurrency=4, speed_loss=1e-4)
    gate.run(300)
    measured = gate.measured
    assert measured.changed > 0  # seldom few: who begins a round is drawn anew, and the speed may be decided early
    assert not measured.repeat
    assert gate.is_sample
    note = f"{measured.changed} of {measured.repeats} repeated greedy answers differed, so that tau is judged as of a s"
    assert note in text(find(gate, compares=True, seconds=clock.now))


def test_tau_is_known_once_answers_came_again() -> None:
    """-2.5%, by answers as different as can be: no verdict of a sample of 96 prompts, and a regression on these. Those
    that came again at the time of the verdict weigh no more than the others."""
    change = {"change": lambda p: {"accepted_drafts": 19 * (int(p[1:]) < 48)}}
    gate, _, _ = gate_of(change, prompts=96, concurrency=4)
    assert gate.run(50) is Verdict.UNDECIDED
    assert len(gate.measured.counts.steps) == 96
    assert gate.measured.repeats < SAME_REPEATS
    gate, _, _ = gate_of(change, prompts=96, concurrency=4)
    assert gate.run(600) is Verdict.REGRESSION
    assert gate.measured.repeat
    assert gate.tau is not None
    assert gate.tau.bounds is not None
    assert gate.tau.bounds.low == gate.tau.bounds.high == pytest.approx(-log(1.95 / 2))
    assert find(gate, compares=True, seconds=1).tau.candidate == pytest.approx(1.95)  # type: ignore[union-attr]


def test_different_outputs_are_reported_and_fail_where_asked() -> None:
    change = {"change": lambda p: {"output": (1, 2, 4)} if p in ("p3", "p40") else {}}
    for identity, verdict in (("report", Verdict.PASS), ("require", Verdict.REGRESSION)):
        gate, clock, log = gate_of(change, identity=identity)
        gate.run(600)
        finding = find(gate, compares=True, seconds=clock.now)
        assert finding.verdict is verdict
        assert set(finding.mismatches) == {"p3", "p40"}
        first = next(p for _, p in log if p in ("p3", "p40"))
        assert f"greedy outputs: 2 of {finding.prompts} prompts differ; the first is prompt {first}" in text(finding)
    assert find(gate, compares=False, seconds=1).mismatches == ()


def test_an_empty_answer_has_no_speed() -> None:
    gate, _, _ = gate_of({"change": lambda p: {"tokens": 0} if p == "p5" else {}})
    with pytest.raises(MeasureFailed, match=r"candidate b: the answer to prompt p5 is empty.*ignore_eos=true"):
        gate.run(600)


def test_other_tokenizers_are_not_compared() -> None:
    gate, _, _ = gate_of({"change": lambda p: {"prompt_tokens": 9}})
    with pytest.raises(
        MeasureFailed, match="has 7 tokens for the baseline and 9 for the candidate: they have other tok"
    ):
        gate.run(600)


def test_without_tau_speed_alone_decides_and_it_is_said() -> None:
    gate, clock, _ = gate_of({"change": lambda p: {"accepted_drafts": 0}}, has_tau=False)
    assert gate.run(600) is Verdict.PASS
    assert "so speed alone was judged" in text(find(gate, compares=True, seconds=clock.now))


@pytest.mark.parametrize(("prompts", "concurrency", "needed"), [(23, 1, 24), (60, 32, 64)])
def test_too_few_prompts(prompts: int, concurrency: int, needed: int) -> None:
    with pytest.raises(ValueError, match=rf"has {prompts} prompts; .* at least {needed}: take a larger workload"):
        gate_of({}, prompts=prompts, concurrency=concurrency)
