"""How often does the gate err? Thousands of simulated gates, each of them `rayspec.gate.rounds.Gate` itself with its
decision, on sides that answer from recorded times.

rayspec gate full full --json noise.json speed_loss=0.0001      # a recording: it goes on until the time is over
python docs/experiments/gate_error_rates.py --noise noise.json --out FOLDER [--runs 2000]

A simulated gate takes the recorded times in runs of successive answers (moving-block bootstrap: Kuensch 1989, Annals of
Statistics 17), so that drift, bursts and what they do to neighbours stay; the candidate's are longer by the loss that
is simulated. Drafts are accepted step by step, each next one with the same chance, such that tau is the recorded one,
and for both sides independently (but for greedy sides that are the same): a change that leaves most answers as they
were has less noise. A greedy answer that varies is seen by its counts alone. The coin is another one in each gate, as
it is in reality. FOLDER/error_rates.json gets the shares of verdicts with 95% Clopper-Pearson intervals.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, stats
from tqdm import tqdm

from rayspec.gate.config import GateConfig
from rayspec.gate.rounds import Gate
from rayspec.gate.sides import Answer, BlockAnswers
from rayspec.provenance import provenance
from rayspec.workloads import Conversation

DRAFTS = 4
RUN_LENGTH = 40  # successive answers that are taken together


@dataclass(frozen=True)
class Scenario:
    """What the candidate has lost. `greedy`: the same answer to a prompt each time, but for the share `varying`, and
    the loss of tau is that on the `prompts` of the workload; else answers are drawn, and it is that of their
    distribution. `counts_blocks`: as vLLM does. `seconds`: what is left of ten minutes once both sides have started."""

    name: str
    speed_loss: float = 0.0
    tau_loss: float = 0.0
    has_tau: bool = True
    tau: float | None = None  # None: the recorded one
    greedy: bool = True
    varying: float = 0.0
    counts_blocks: bool = False
    concurrency: int = 1
    block_cost: float = 1.0  # a block takes so many times as long as one answer
    prompts: int = 96
    seconds: float = 480.0


SCENARIOS = (
    Scenario("A/A"),
    Scenario("A/A, speed alone", has_tau=False),
    Scenario("A/A, drawn, 16 streams", greedy=False, concurrency=16, prompts=1600),
    Scenario("speed -2.5%", speed_loss=0.025),
    Scenario("speed -5%", speed_loss=0.05),
    Scenario("speed -10%", speed_loss=0.10),
    Scenario("speed +5%", speed_loss=-0.05),
    Scenario("tau -1%, 4 streams", tau_loss=0.01, concurrency=4),
    Scenario("tau -2%, 1 stream", tau_loss=0.02),
    Scenario("tau -2%, 4 streams", tau_loss=0.02, concurrency=4),
    Scenario("tau -2%, drawn, 1 stream", tau_loss=0.02, greedy=False),
    Scenario("tau -2%, drawn, 16 streams", tau_loss=0.02, greedy=False, concurrency=16, prompts=1600),
    *(
        Scenario(f"A/A, 4 streams, {varying:.0%} vary", varying=varying, concurrency=4)
        for varying in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    ),
    *(
        Scenario(f"A/A, 4 streams of tau 2.5, {varying:.0%} vary", tau=2.5, varying=varying, concurrency=4)
        for varying in (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    ),
    *(
        Scenario(f"tau -{loss:.0%}, 4 streams, {varying:.0%} vary", tau_loss=loss, varying=varying, concurrency=4)
        for loss, varying in ((0.02, 0.05), (0.02, 0.2), (0.05, 0.2), (0.1, 0.2))
    ),
    # what one engine on two cores was measured to take: docs/results/policy-smollm2
    Scenario("A/A, 4 streams that cost 2.0", concurrency=4, block_cost=2.0),
    Scenario("tau -2%, 4 streams that cost 1.5", tau_loss=0.02, concurrency=4, block_cost=1.5),
    Scenario("tau -2%, 4 streams that cost 2.0", tau_loss=0.02, concurrency=4, block_cost=2.0),
    Scenario("tau -2%, 4 streams that cost 2.0, 15 minutes", tau_loss=0.02, concurrency=4, block_cost=2.0, seconds=780),
    Scenario("tau -5%, 4 streams that cost 2.0", tau_loss=0.05, concurrency=4, block_cost=2.0),
    Scenario(
        "tau -2%, drawn, 16 streams that cost 4.7",
        tau_loss=0.02,
        greedy=False,
        concurrency=16,
        block_cost=4.7,
        prompts=1600,
    ),
    Scenario("A/A, 4 streams, by block", counts_blocks=True, concurrency=4),
    Scenario("A/A, 4 streams, by block, 20% vary", counts_blocks=True, varying=0.2, concurrency=4),
    Scenario("tau -2%, 4 streams, by block", tau_loss=0.02, counts_blocks=True, concurrency=4),
    Scenario("tau -10%, 4 streams, by block", tau_loss=0.1, counts_blocks=True, concurrency=4),
)


@dataclass(frozen=True)
class Noise:
    """Successive seconds a token, tokens of an answer, what a round takes beside its answers, and tau."""

    seconds_per_token: np.ndarray
    tokens: int
    overhead_s: float
    tau: float

    @property
    def steps(self) -> int:
        """Verify steps of an answer."""
        return max(1, round(self.tokens / self.tau))

    @classmethod
    def read(cls, file: Path) -> "Noise":
        """Of a sweep's journal (.jsonl), or of the JSON of an A/A gate or of gate_series.py."""
        if file.suffix == ".jsonl":
            return cls.of_journal(file)
        found = json.loads(file.read_text())
        gates = found.get("runs", [found])
        blocks = [block for gate in gates for round_ in gate["blocks"] for block in round_]
        answering_s = sum(seconds for _, seconds, _ in blocks)
        return cls(
            seconds_per_token=np.array([seconds / tokens for _, seconds, tokens in blocks]),
            tokens=round(np.mean([tokens for _, _, tokens in blocks])),
            overhead_s=max(0.0, sum(gate["measuring_seconds"] for gate in gates) - answering_s) / len(blocks),
            tau=gates[0]["tau"]["baseline"],
        )

    @classmethod
    def of_journal(cls, file: Path) -> "Noise":
        """Of the speculative trials of a sweep, less what each trial and each prompt has for itself."""
        rounds = [e for e in map(json.loads, file.read_text().splitlines()) if e["event"] == "round"]
        rows = [
            (trial, (r["prompt_id"], r["turn"]), r["e2e_s"] / len(r["output_ids"]), r)
            for round_ in rounds
            for trial, measured in round_["blocks"].items()
            for r in measured["requests"]
            if r["verify_steps"]
        ]
        logs = np.log([seconds for _, _, seconds, _ in rows])
        left = logs - logs.mean()
        for column in (0, 1):
            for key in {row[column] for row in rows}:
                own = np.array([row[column] == key for row in rows])
                left[own] -= left[own].mean()
        fitted = sum(len({row[column] for row in rows}) for column in (0, 1)) - 1
        left *= np.sqrt(len(rows) / (len(rows) - fitted))  # what those means took of the noise
        steps, accepted = (sum(r[k] for *_, r in rows) for k in ("verify_steps", "accepted_drafts"))
        return cls(
            seconds_per_token=np.exp(left + logs.mean()),
            tokens=round(np.mean([len(r["output_ids"]) for *_, r in rows])),
            overhead_s=0.3,  # of a swap and a short warm-up
            tau=1 + accepted / steps,
        )


def acceptance(tau: float) -> np.ndarray:
    """Shares of verify steps with 0 .. DRAFTS accepted drafts, each next one with the same chance."""

    def shares(chance: float) -> np.ndarray:
        reached = chance ** np.arange(DRAFTS + 1)
        return reached - np.append(reached[1:], 0)

    chance = optimize.brentq(lambda c: 1 + np.arange(DRAFTS + 1) @ shares(c) - tau, 0, 1)
    return shares(float(chance))


class World:
    """A clock, and times that go on from answer to answer whoever gives it."""

    def __init__(self, noise: Noise, rng: np.random.Generator) -> None:
        self.noise, self.rng, self.now = noise, rng, 0.0
        self._at = self._left = 0

    def seconds_per_token(self) -> float:
        if not self._left:
            self._at, self._left = int(self.rng.integers(len(self.noise.seconds_per_token))), RUN_LENGTH
        value = self.noise.seconds_per_token[self._at % len(self.noise.seconds_per_token)]
        self._at, self._left = self._at + 1, self._left - 1
        return float(value)


class SimulatedSide:
    """One side, which has lost the share `speed_loss` of its speed; `accepted` gives the drafts accepted in the answer
    to a prompt."""

    def __init__(
        self, label: str, world: World, speed_loss: float, accepted: Callable[[str], int], scenario: Scenario
    ) -> None:
        self.label, self.world, self.accepted = label, world, accepted
        self.counts_blocks = scenario.counts_blocks
        self.slowdown = scenario.block_cost / (1 - speed_loss)

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        world, tokens = self.world, self.world.noise.tokens
        wall_s = world.seconds_per_token() * tokens * self.slowdown
        world.now += wall_s + world.noise.overhead_s
        answers = [self._answer(p, tokens, wall_s) for p in prompts]
        if self.counts_blocks:
            answers = of_block(answers)
        return BlockAnswers(wall_s=wall_s, answers=tuple(answers))

    def _answer(self, prompt: Conversation, tokens: int, wall_s: float) -> Answer:
        return Answer(
            prompt_id=prompt.id,
            turn=0,
            prompt_tokens=1,
            tokens=tokens,
            output="",
            verify_steps=self.world.noise.steps,
            accepted_drafts=self.accepted(prompt.id),
            ttft_s=0.0,
            e2e_s=wall_s,
        )

    def stop(self) -> None:
        pass


def of_block(answers: Sequence[Answer]) -> list[Answer]:
    """All counts at the first answer."""
    steps, accepted = (sum(getattr(a, name) for a in answers) for name in ("verify_steps", "accepted_drafts"))
    silent = [replace(a, verify_steps=0, accepted_drafts=0) for a in answers]
    return [replace(silent[0], verify_steps=steps, accepted_drafts=accepted), *silent[1:]]


def drawn(rng: np.random.Generator, noise: Noise, tau_loss: float) -> Callable[[str], int]:
    """Every answer is another one."""
    shares = acceptance(noise.tau * (1 - tau_loss))
    return lambda prompt: int(np.arange(DRAFTS + 1) @ rng.multinomial(noise.steps, shares))


def greedy(rng: np.random.Generator, noise: Noise, scenario: Scenario) -> list[Callable[[str], int]]:
    """Of (baseline, candidate): fixed answers, but for those that vary. The candidate's differ on every prompt, and in
    all by the tau that is lost: a share of the drafts of prompts drawn for it, until the sum is right."""
    draw = drawn(rng, noise, 0.0)
    base = np.array([draw("") for _ in range(scenario.prompts)])
    own = base.copy()
    if scenario.tau_loss:
        own = np.array([draw("") for _ in range(scenario.prompts)])
        wanted = int((1 - scenario.tau_loss) * (base + noise.steps).sum() - noise.steps * scenario.prompts)
        while own.sum() != wanted:
            step = 1 if own.sum() < wanted else -1
            prompt = rng.integers(scenario.prompts)
            own[prompt] = max(0, own[prompt] + step)
    fixed = [lambda prompt, of=of: int(of[int(prompt)]) for of in (base, own)]
    if not scenario.varying:
        return fixed
    others = [draw, drawn(rng, noise, scenario.tau_loss)]
    return [
        lambda prompt, of=of, other=other: (other if rng.random() < scenario.varying else of)(prompt)
        for of, other in zip(fixed, others, strict=True)
    ]


def simulate(scenario: Scenario, noise: Noise, seed: int) -> tuple[str, float, int]:
    """(verdict, seconds, rounds) of one gate."""
    rng = np.random.default_rng([seed, hash_of(scenario.name)])
    noise = replace(noise, tau=scenario.tau or noise.tau)
    world = World(noise, rng)
    if scenario.greedy:
        accepted = greedy(rng, noise, scenario)
    else:
        accepted = [drawn(rng, noise, 0.0), drawn(rng, noise, scenario.tau_loss)]
    losses = (0.0, scenario.speed_loss)
    sides = [
        SimulatedSide(label, world, loss, of, scenario) for label, loss, of in zip("ab", losses, accepted, strict=True)
    ]
    prompts = [Conversation(id=str(i), category="c", turns=("t",)) for i in range(scenario.prompts)]
    config = GateConfig(temperature=0.0 if scenario.greedy else 1.0, concurrency=scenario.concurrency)
    coin = random.Random(int(rng.integers(2**32)))
    gate = Gate(config, sides, prompts, has_tau=scenario.has_tau, clock=lambda: world.now, coin=coin)
    verdict = gate.run(scenario.seconds)
    return str(verdict), world.now, len(gate.measured.losses)


def hash_of(text: str) -> int:
    """The same in every process."""
    return int.from_bytes(text.encode()[-6:], "big")


def rates(found: Sequence[tuple[str, float, int]]) -> dict[str, Any]:
    counts, n = Counter(verdict for verdict, _, _ in found), len(found)
    intervals = {v: stats.binomtest(counts[v], n).proportion_ci(0.95) for v in ("pass", "regression", "undecided")}
    return {
        "runs": n,
        **{v: [counts[v] / n, round(i.low, 5), round(i.high, 5)] for v, i in intervals.items()},
        "median_seconds": float(np.median([s for _, s, _ in found])),
        "median_rounds": float(np.median([r for _, _, r in found])),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--noise", required=True, type=Path, nargs="+")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=2000, help="of a candidate that lost nothing; half of the others")
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **provenance()}
    for file in options.noise:
        noise = Noise.read(file)
        for scenario in (s for s in SCENARIOS if options.only in s.name):
            runs = options.runs // (1 if scenario.speed_loss == scenario.tau_loss == 0 else 2)
            found = [
                simulate(scenario, noise, seed)
                for seed in tqdm(range(runs), desc=f"{file.stem}: {scenario.name}", mininterval=10)
            ]
            result.setdefault(file.stem, {})[scenario.name] = rates(found)
            (options.out / "error_rates.json").write_text(json.dumps(result, indent=1) + "\n")
            print(file.stem, scenario.name, json.dumps(result[file.stem][scenario.name]), flush=True)


if __name__ == "__main__":
    main()
