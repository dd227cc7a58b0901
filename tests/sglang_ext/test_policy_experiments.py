"""docs/experiments/{policy,plain_steps,step_parts,policy_simulated,starts}.py: what they compute, without an engine."""

import importlib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
NAMES = ["policy", "0", "2", "4"]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))

    def named(name: str) -> ModuleType:
        return importlib.import_module(name)

    return named


def test_a_command_line_of_a_policy_is_read(experiment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["--target", "t", "--drafter", "d", "--prompts", "p", "--out", "o"]
    monkeypatch.setattr("sys.argv", ["policy.py", *needed, "--skip", "96", "--starts", "3", "--new-tokens", "48"])
    options = experiment("policy").arguments()
    assert (options.skip, options.starts, options.new_tokens, options.blocks) == (96, 3, 48, 8)
    monkeypatch.setattr("sys.argv", ["policy.py", *needed])
    with pytest.raises(SystemExit):  # no prompts are left to measure a policy with
        experiment("policy").arguments()


def test_the_parts_of_a_step_add_up_to_it(experiment: Any) -> None:
    step_parts = experiment("step_parts")
    of_plain = {"streams": 4, "step": 0.040, "run_batch": 0.039, "target": 0.038, "pass": 0.036, "result": 0.0004}
    of_policy = {**of_plain, "policy": 0.0387, "plain_step": 0.0382, "next_batch": 0.0002}
    for step in (of_plain, of_policy):
        parts = step_parts.parts(step)
        assert sum(parts.values()) - parts["step"] - parts["outside"] == pytest.approx(40)
        assert parts["outside"] == pytest.approx(4)
    assert step_parts.parts(of_policy)["policy"] == pytest.approx(0.5)
    drafted = {**of_policy}
    del drafted["plain_step"]
    assert step_parts.summary([of_policy, of_policy, drafted])[4]["steps"] == 2


def test_each_engine_follows_each_other_one(experiment: Any) -> None:
    order = experiment("policy").order
    orders = [order(NAMES, 16, block) for block in range(-1, 199)]
    assert orders == [order(NAMES, 16, block) for block in range(-1, 199)]
    assert all(sorted(names) == sorted(NAMES) for names in orders)
    follows = Counter(pair for names in orders for pair in pairwise(names))
    assert len(follows) == 12
    assert min(follows.values()) > 30  # of 50; an order that only moves on has 150 of four pairs, and none of eight


def test_the_times_of_each_block_are_kept(experiment: Any) -> None:
    policy, asked = experiment("policy"), Counter[str]()

    def server(name: str) -> SimpleNamespace:
        def do(function: Any, *_: Any) -> Any:
            if function is policy.policy_report:
                return {"steps": {"0": asked[name]}}
            asked[name] += 1
            return [{"output_ids": [0] * 3}] * 2, asked[name] + 0.5

        return SimpleNamespace(do=do)

    options = SimpleNamespace(streams=[2], blocks=4, new_tokens=3)
    each = [(6, 2.5), (6, 3.5), (6, 4.5), (6, 5.5)]  # the first was the warm-up
    blocks: dict[int, Any] = {}
    for start in range(2):
        asked.clear()
        servers = {name: server(name) for name in ("policy", "0")}
        for written, _ in enumerate(policy.measured(servers, ["a", "b", "c"], options, start, blocks), start=1):
            known = policy.summary(blocks)[2]
            times = start * each + each[:written]
            assert known["blocks"] == {"policy": times, "0": times}
            assert known["policy_over"]["0"][0] == pytest.approx(1.0)
            assert known["policy_steps"] == {"0": len(times)}
        assert written == 4


def test_the_interval_of_a_median_covers_it(experiment: Any) -> None:
    interval = experiment("plain_steps").median_interval
    assert interval(np.arange(13.0)[::-1]) == [6.0, 2.0, 10.0]
    for blocks in (6, 8, 13, 24, 60):
        _, low, _ = interval(np.arange(float(blocks)))
        beyond = int(low) + 1  # P(fewer than so many values lie on one side of the median)
        assert 2 * binom.cdf(beyond - 1, blocks, 0.5) <= 0.05 < 2 * binom.cdf(beyond, blocks, 0.5)
    assert interval(np.arange(5.0)) == [2.0, None, None]


def test_first_tokens_and_steps_make_up_a_block(experiment: Any) -> None:
    total_ratio = experiment("plain_steps").total_ratio
    own_BN = np.random.default_rng(0).uniform(1, 2, (12, 5)).cumsum(axis=1)
    other_BN = own_BN.copy()
    other_BN[:, 2:] += own_BN[:, -1:] / 10  # one slow step, which the median of the ratios of steps does not see
    steps, first = np.diff(own_BN, axis=1), own_BN[:, :1]
    assert experiment("plain_steps").ratio(steps, np.diff(other_BN, axis=1))[0] == pytest.approx(1.0)
    assert total_ratio(own_BN[:, -1:], other_BN[:, -1:]) == pytest.approx([1.1, 1.1, 1.1], abs=1e-3)
    share = first.sum() / own_BN[:, -1].sum()
    parts = [total_ratio(first, other_BN[:, :1])[0], total_ratio(steps, np.diff(other_BN, axis=1))[0]]
    assert share * parts[0] + (1 - share) * parts[1] == pytest.approx(1.1, abs=1e-3)


@pytest.mark.parametrize("engine", [0.0, 0.03])
def test_what_engines_differ_by_is_told_from_what_blocks_do(experiment: Any, engine: float) -> None:
    starts, blocks, engines = 60, 10, 3
    rng = np.random.default_rng(0)
    log_SBE = rng.normal(0, 0.3, (starts, blocks, 1)) + rng.normal(0, 0.05, (starts, blocks, engines))
    log_SBE += rng.normal(0, engine, (starts, 1, engines))
    found = experiment("starts").spread(np.exp(log_SBE))
    assert found["block"] == pytest.approx(0.05, rel=0.1)
    assert found["engine"] == pytest.approx(engine, rel=0.2, abs=0.008)
    assert (found["p_value_without_it"] < 1e-6) == (engine > 0)
    assert found["engine"] <= found["engine_at_most"] < engine + 0.015


def test_the_bound_on_what_engines_differ_by_holds_in_nineteen_of_twenty(experiment: Any) -> None:
    spread, engine, rng = experiment("starts").spread, 0.02, np.random.default_rng(1)
    holds = 0
    for _ in range(400):
        log_SBE = rng.normal(0, 0.05, (4, 10, 3)) + rng.normal(0, engine, (4, 1, 3))
        holds += spread(np.exp(log_SBE))["engine_at_most"] >= engine
    assert 0.92 < holds / 400 < 0.98


def test_the_simulation(experiment: Any) -> None:
    """Of plain decoding and of the best fixed length, where both are known; and what it finds of the policy."""
    simulated = experiment("policy_simulated")
    tokens, shares = simulated.long_run(0.6, simulated.ALIKE, 4)
    assert tokens == pytest.approx(1 + 0.6 + 0.36 + 0.216 + 0.1296, rel=0.01)
    assert shares == pytest.approx([0.6] * 4, abs=0.01)
    mixed = simulated.follow(simulated.Scenario(1.2, 2.0), seed=0, steps=4000)
    assert mixed["over_best_fixed"] > 0.95
    assert mixed["over_plain"] == pytest.approx(1.2 * mixed["over_best_fixed"])
    assert simulated.follow(simulated.Scenario(0.7), seed=0, steps=4000)["over_plain"] > 0.98
    late = simulated.follow(simulated.Scenario(1.8, prior=0.2, mean=0.85), seed=0, steps=4000)
    assert late["over_plain"] > 1.6
