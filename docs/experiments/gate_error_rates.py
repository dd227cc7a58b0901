"""How often does the gate err? Thousands of simulated gates, each of them `rayspec.gate.rounds.Gate` itself with its
decision, on sides that answer from recorded times.

rayspec gate full full --json noise.json speed_loss=0.0001      # a recording: it goes on until the time is over
python docs/experiments/gate_error_rates.py --noise noise.json --out FOLDER [--runs 2000]

A simulated gate takes the recorded times in runs of successive answers (moving-block bootstrap: Kuensch 1989, Annals of
Statistics 17), so that drift, bursts and what they do to neighbours stay; the candidate's are longer by the loss that
is simulated. Acceptance is drawn step by step, of both sides independently, each next draft with the same chance, such
that tau is the recorded one: what a temperature above 0 does. Greedy sides that are the same never differ, and greedy
ones that differ a little differ in a few steps, so that this is the hardest case. FOLDER/error_rates.json gets the
shares of verdicts with 95% Clopper-Pearson intervals.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    """What the candidate has lost. `seconds`: what is left of ten minutes once both sides have started."""

    name: str
    speed_loss: float = 0.0
    tau_loss: float = 0.0
    has_tau: bool = False
    seconds: float = 480.0


SCENARIOS = (
    Scenario("A/A, speed"),
    Scenario("A/A, speed and tau", has_tau=True),
    Scenario("speed -2.5%", speed_loss=0.025),
    Scenario("speed -5%", speed_loss=0.05),
    Scenario("speed -10%", speed_loss=0.10),
    Scenario("speed +5%", speed_loss=-0.05),
    Scenario("tau -1%", tau_loss=0.01, has_tau=True),
    Scenario("tau -2%", tau_loss=0.02, has_tau=True),
    Scenario("tau -4%", tau_loss=0.04, has_tau=True),
)


@dataclass(frozen=True)
class Noise:
    """Successive seconds a token, tokens of an answer, what a round takes beside its answers, and tau."""

    seconds_per_token: np.ndarray
    tokens: int
    overhead_s: float
    tau: float

    @classmethod
    def read(cls, file: Path) -> "Noise":
        """Of the JSON of an A/A gate."""
        found = json.loads(file.read_text())
        blocks = [block for round_ in found["blocks"] for block in round_]
        answering_s = sum(seconds for _, seconds, _ in blocks)
        return cls(
            seconds_per_token=np.array([seconds / tokens for _, seconds, tokens in blocks]),
            tokens=round(np.mean([tokens for _, _, tokens in blocks])),
            overhead_s=max(0.0, found["measuring_seconds"] - answering_s) / len(blocks),
            tau=found["tau"]["baseline"],
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
    """One side: `loss` shares of speed and tau are gone."""

    def __init__(self, label: str, world: World, speed_loss: float, tau_loss: float) -> None:
        self.label, self.world = label, world
        self.slowdown = 1 / (1 - speed_loss)
        self.accepted = acceptance(world.noise.tau * (1 - tau_loss))
        self.steps = max(1, round(world.noise.tokens / world.noise.tau))

    def answer(self, prompts: Sequence[Conversation]) -> BlockAnswers:
        world, tokens = self.world, self.world.noise.tokens
        wall_s = world.seconds_per_token() * tokens * self.slowdown
        world.now += wall_s + world.noise.overhead_s
        return BlockAnswers(wall_s=wall_s, answers=tuple(self._answer(p, tokens, wall_s) for p in prompts))

    def _answer(self, prompt: Conversation, tokens: int, wall_s: float) -> Answer:
        counts = self.world.rng.multinomial(self.steps, self.accepted)
        return Answer(
            prompt_id=prompt.id,
            turn=0,
            prompt_tokens=1,
            tokens=tokens,
            output="",
            verify_steps=self.steps,
            accepted_drafts=int(np.arange(DRAFTS + 1) @ counts),
            ttft_s=0.0,
            e2e_s=wall_s,
        )

    def stop(self) -> None:
        pass


def simulate(scenario: Scenario, noise: Noise, seed: int, num_prompts: int) -> tuple[str, float, int]:
    """(verdict, seconds, rounds) of one gate."""
    rng = np.random.default_rng([seed, abs(hash_of(scenario.name))])
    world = World(noise, rng)
    sides = [SimulatedSide("a", world, 0, 0), SimulatedSide("b", world, scenario.speed_loss, scenario.tau_loss)]
    prompts = [Conversation(id=str(i), category="c", turns=("t",)) for i in range(num_prompts)]
    # drawn answers, which a temperature above 0 says
    config = GateConfig(seed=int(rng.integers(2**32)), temperature=1.0)
    gate = Gate(config, sides, prompts, has_tau=scenario.has_tau, clock=lambda: world.now)
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
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=1000)
    options = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), **provenance()}
    for file in options.noise:
        noise = Noise.read(file)
        for scenario in SCENARIOS:
            found = [
                simulate(scenario, noise, seed, options.prompts)
                for seed in tqdm(range(options.runs), desc=f"{file.stem}: {scenario.name}", mininterval=10)
            ]
            result.setdefault(file.stem, {})[scenario.name] = rates(found)
            print(file.stem, scenario.name, json.dumps(result[file.stem][scenario.name]), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "error_rates.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
