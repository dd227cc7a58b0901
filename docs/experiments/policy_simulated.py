"""What the measured policy gives and costs, simulated: `sglang_ext.policy.choice.MeasuredPolicy` itself against plain
decoding and the best fixed length, on requests whose drafts are accepted by chance; no engine.

python docs/experiments/policy_simulated.py --out FOLDER [--seeds 6] [--steps 20000] [--processes 2] [--only TEXT]

A request has 64 tokens and an acceptance of its own, drawn from a Beta distribution of a mean and a concentration
(small: unlike requests; inf: all alike); each next draft of it is accepted with that chance. The next request takes the
place of one that has ended. Costs are known exactly and such that the longest draft gives `gain` of plain decoding in
the long run; a shorter one has its share of the longest's time. A plain step for which the drafter's cache is kept up
takes 3% more, which no curve says, and requests that ran while it was not kept up accept nothing.

The prior is what is accepted in truth, or wrong. In a change of regime the mean acceptance is another one after half of
the steps. Fixed lengths are given the tokens of the policy's run and their long-run rates, so that both take part in
the same change. Writes simulated.json: of each scenario the policy's speed over plain decoding and over the best fixed
length, means with 95% intervals (Student's t) over seeds, and the share of steps without drafts.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from tqdm import tqdm

from rayspec.provenance import provenance
from sglang_ext.policy.choice import MeasuredPolicy
from sglang_ext.policy.table import FORMAT, CostCurve, PolicyTable
from sglang_ext.whole import write_whole

ANSWER = 64  # tokens
PLAIN_MS, KEPT_UP = 10.0, 1.03
GAINS = (0.7, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.8)
ALIKE = float("inf")


@dataclass(frozen=True)
class Scenario:
    """`gain`: of the longest draft over plain decoding at `mean`; `then`: the mean after half of the steps."""

    gain: float
    concentration: float = 4.0
    lengths: tuple[int, ...] = (0, 4)
    streams: int = 1
    mean: float = 0.6
    then: float | None = None
    prior: float | None = None  # at every position; None: the truth at first


def scenarios() -> Iterator[tuple[str, Scenario]]:
    """With the group that the table has a row of."""
    groups = {
        "right prior": {},
        "prior 0.2, truth 0.85": {"prior": 0.2, "mean": 0.85},
        "prior 0.95, truth 0.6": {"prior": 0.95},
    }
    lengths = ((0, 4), (0, 2, 4))
    for (name, values), among in product(groups.items(), lengths):
        for gain, concentration in product(GAINS, (2.0, ALIKE) if values else (2.0, 4.0, 10.0, ALIKE)):
            yield f"{name}, lengths {among}", Scenario(gain, concentration, among, **values)
    for streams, gain in product((4, 16, 32), GAINS):
        yield f"{streams} streams", Scenario(gain, 2.0, (0, 2, 4), streams)
    for streams, gain in product((4, 16, 32), GAINS[::2]):
        yield f"{streams} streams, prior 0.2, truth 0.85", Scenario(gain, 4.0, (0, 4), streams, prior=0.2, mean=0.85)
    for name, (first, then) in {"0.85, then 0.3": (0.85, 0.3), "0.3, then 0.85": (0.3, 0.85)}.items():
        for streams, gain, concentration in product((1, 16), (1.05, 1.2, 1.8), (4.0, ALIKE)):
            # the gain is that of the better half
            worse = gain * long_run(0.3, concentration, 4)[0] / long_run(0.85, concentration, 4)[0]
            at_first = gain if first > then else worse
            yield name, Scenario(at_first, concentration, (0, 4), streams, first, then)


@cache
def long_run(mean: float, concentration: float, drafts: int) -> tuple[float, tuple[float, ...]]:
    """Tokens a step at a fixed length, and the shares accepted at each position among the steps that got there."""
    rng, requests = np.random.default_rng(0), 20_000
    accepted_RS = accepted(rng, acceptances(rng, mean, concentration, requests)[:, None], (requests, ANSWER), drafts)
    tokens_RS = np.cumsum(accepted_RS + 1, axis=1)
    runs_RS = tokens_RS - accepted_RS - 1 < ANSWER
    counts = np.bincount(accepted_RS[runs_RS], minlength=drafts + 1)
    at_least = counts[::-1].cumsum()[::-1]
    return 1 + float(at_least[1:].sum() / at_least[0]), tuple(at_least[1:] / at_least[:-1])


def acceptances(rng: np.random.Generator, mean: float, concentration: float, requests: int) -> np.ndarray:
    if concentration == ALIKE:
        return np.full(requests, mean)
    return rng.beta(mean * concentration, (1 - mean) * concentration, requests)


def accepted(rng: np.random.Generator, chance: np.ndarray, shape: tuple[int, ...], drafts: int) -> np.ndarray:
    """Of each chain: how many coins in a row fall below its chance."""
    with np.errstate(divide="ignore"):
        in_a_row = np.log(rng.random(shape)) / np.log(np.clip(chance, 1e-12, 1 - 1e-12))
    return np.minimum(in_a_row, drafts).astype(int)


def answer(rng: np.random.Generator, mean: float, concentration: float) -> Iterator[int]:
    """How many drafts of a step would be accepted, step by step of one request."""
    return iter(accepted(rng, acceptances(rng, mean, concentration, 1), (ANSWER,), ANSWER).tolist())


def table(scenario: Scenario) -> PolicyTable:
    longest = scenario.lengths[-1]
    tokens, shares = long_run(scenario.mean, scenario.concentration, longest)
    extra_ms = PLAIN_MS * (tokens / scenario.gain - 1) / longest
    return PolicyTable(
        format_version=FORMAT,
        curves=[
            CostCurve(draft_steps=k, requests=[scenario.streams], step_ms=[PLAIN_MS + extra_ms * k])
            for k in scenario.lengths
        ],
        accepted_if_reached=[scenario.prior] * longest if scenario.prior is not None else list(shares),
    )


def follow(scenario: Scenario, seed: int, steps: int) -> dict[str, float]:
    """The policy's speed over plain decoding, the best fixed length and the best of each regime; share off."""
    costs, rng = table(scenario), np.random.default_rng(seed)
    policy = MeasuredPolicy(costs, start=scenario.lengths[-1])
    means = (scenario.mean, scenario.mean if scenario.then is None else scenario.then)
    emitted, ms, off = [0, 0], 0.0, 0
    n = scenario.streams
    left, is_drafted, number = [0] * n, [True] * n, list(range(-n, 0))  # the requests' numbers: none comes twice
    fate: list[Iterator[int]] = [iter(()) for _ in range(n)]  # of each request: drafts that would be accepted, by step
    for step in range(steps):
        half = int(2 * step >= steps)
        for i in range(n):
            if left[i] <= 0:
                left[i], is_drafted[i], number[i] = ANSWER, True, number[i] + n
                fate[i] = answer(rng, means[half], scenario.concentration)
        choice = policy.choose(dict(zip(number, is_drafted, strict=True)))
        k = choice.draft_steps
        counts = [min(k, next(fate[i])) if k and is_drafted[i] else 0 for i in range(n)]
        policy.see(counts)
        left = [tokens - count - 1 for tokens, count in zip(left, counts, strict=True)]
        emitted[half] += n + sum(counts)
        off += k == 0
        ms += costs.step_ms(k, n) * (KEPT_UP if k == 0 and choice.keeps_up else 1)
        if k == 0 and not choice.keeps_up:
            is_drafted = [False] * n
    taken = {
        k: [t / n / (long_run(mean, scenario.concentration, k)[0] if k else 1.0) * costs.step_ms(k, n)
            for t, mean in zip(emitted, means, strict=True)]
        for k in scenario.lengths
    }  # fmt: skip
    return {
        "over_plain": sum(taken[0]) / ms,
        "over_best_fixed": min(map(sum, taken.values())) / ms,
        "over_best_of_each_half": sum(map(min, zip(*taken.values(), strict=True))) / ms,
        "off": off / steps,
        "switches": policy.switches,
    }


def interval(values: list[float]) -> list[float]:
    """[mean, low, high]"""
    mean, half = np.mean(values), stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return [round(float(x), 4) for x in (mean, mean - half, mean + half)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    for name, value in (("seeds", 6), ("steps", 20_000), ("processes", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default="", help="groups whose name holds this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    head: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **provenance()}
    cases = [(group, scenario) for group, scenario in scenarios() if options.only in group]
    runs = [(scenario, seed) for _, scenario in cases for seed in range(options.seeds)]
    with get_context("fork").Pool(options.processes) as pool:
        done = list(tqdm(pool.imap(partial(star, options.steps), runs, chunksize=4), total=len(runs), mininterval=10))
    found = []
    for i, (group, scenario) in enumerate(cases):
        of = done[i * options.seeds : (i + 1) * options.seeds]
        found.append({"group": group, **asdict(replace(scenario, concentration=str(scenario.concentration)))})
        found[-1] |= {name: interval([run[name] for run in of]) for name in of[0]}
    write_whole(options.out / "simulated.json", json.dumps({**head, "scenarios": found}, indent=1) + "\n")


def star(steps: int, run: tuple[Scenario, int]) -> dict[str, float]:
    return follow(*run, steps)


if __name__ == "__main__":
    main()
