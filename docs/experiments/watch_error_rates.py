"""How often does the watch of a roll-over err? Simulated counters of two versions, judged by `rayspec.serving.figures`
itself as `Rollover` does: the version before over five minutes of polls, the new one looked at every 5 s.

python docs/experiments/watch_error_rates.py --requests docs/results/gate/quiet.jsonl --out FILE [--runs 300]

Requests come by a Poisson process and take 20 s each, over which their verify steps and accepted drafts are spread.
`recorded`: those of a sweep's journal; `uneven`: tau 2.3 with a standard deviation of 0.7 between requests. A prompt
has 200 tokens in the middle and 2,000 once in a hundred times; the first token takes 50 ms and a millisecond for each
of them, give or take half. The new version's tau is lower by a share, or its first tokens are late by one. FILE gets
the shares of roll-backs with 95% Clopper-Pearson intervals.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import stats
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.serving.figures import Totals, WatchBounds, spent, window, worse

REQUEST_S, POLL_S, LOOK_S, WATCH_S = 20.0, 30.0, 5.0, 300.0
RATES = (0.1, 0.2, 0.5, 2.0)  # requests a second
LOSSES = (0.0, 0.15, 0.2, 0.25)  # of tau
DELAYS = (0.5, 1.5, 2.0, 3.0)  # more than the time to the first token was

Draw = Callable[[np.random.Generator, int], np.ndarray]  # (verify steps, accepted drafts) of so many requests


def recorded(journal: Path) -> Draw:
    rounds = [e for e in map(json.loads, journal.read_text().splitlines()) if e["event"] == "round"]
    found = [r for e in rounds for block in e["blocks"].values() for r in block["requests"] if r["verify_steps"]]
    pairs = np.array([(r["verify_steps"], r["accepted_drafts"]) for r in found], dtype=float)
    return lambda rng, count: pairs[rng.integers(len(pairs), size=count)]


def uneven(rng: np.random.Generator, count: int) -> np.ndarray:
    tau = np.clip(1 + 1.5 * rng.gamma(4.94, 1 / 4.94, count), 1, 5)
    steps = np.round(128 / tau)
    return np.stack([steps, np.round(steps * (tau - 1))], axis=1)


def counters(
    rng: np.random.Generator, draw: Draw, rate: float, step_s: float, *, loss: float = 0.0, delay: float = 0.0
) -> list[Totals]:
    """What a version's counters say every `step_s`; some requests run when it begins."""
    begins = rng.uniform(-REQUEST_S, WATCH_S, rng.poisson(rate * (WATCH_S + REQUEST_S)))
    counts_R2 = draw(rng, len(begins))
    prompt_tokens_R = np.exp(rng.normal(np.log(200), 1, len(begins)))
    ttft_R = (1 + delay) * (0.05 + 0.001 * prompt_tokens_R) * np.exp(rng.normal(0, 0.4, len(begins)))
    marks = []
    for now in np.arange(0, WATCH_S + step_s / 2, step_s):
        done_R = np.clip((now - begins) / REQUEST_S, 0, 1) - np.clip(-begins / REQUEST_S, 0, 1)
        steps, accepted = done_R @ counts_R2
        emitted = max(steps, (1 - loss) * (steps + accepted))
        has_ended_R = (begins + REQUEST_S <= now) & (begins + REQUEST_S > 0)
        has_token_R = (begins + ttft_R <= now) & (begins + ttft_R > 0)
        marks.append(
            Totals(
                verified=steps,
                accepted=emitted - steps,
                requests=float(has_ended_R.sum()),
                first_tokens=float(has_token_R.sum()),
                ttft_s=float(ttft_R @ has_token_R),
                prompt_tokens=float(prompt_tokens_R @ has_ended_R),
            )
        )
    return marks


def is_rolled_back(rng: np.random.Generator, draw: Draw, rate: float, change: dict[str, float]) -> bool:
    before, marks = window(counters(rng, draw, rate, POLL_S)), counters(rng, draw, rate, LOOK_S, **change)
    looks = len(marks) - 1
    return any(
        worse(
            window(marks[: look + 1]),
            before,
            WatchBounds(),
            of_first_drafts=False,
            level=spent(look / looks) - spent((look - 1) / looks),
        )
        for look in range(1, looks + 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=300)
    options = parser.parse_args()
    rows = []
    cases = [
        (name, draw, rate, change)
        for name, draw in (("recorded", recorded(options.requests)), ("uneven", uneven))
        for rate in RATES
        for change in [{"loss": loss} for loss in LOSSES] + [{"delay": delay} for delay in DELAYS]
    ]
    for name, draw, rate, change in tqdm(cases, unit=" cases"):
        rolled_back = sum(
            is_rolled_back(np.random.default_rng([run, 3]), draw, rate, change) for run in range(options.runs)
        )
        low, high = stats.binomtest(rolled_back, options.runs).proportion_ci()
        case = {"requests": name, "rate": rate, "loss": 0.0, "delay": 0.0} | change
        share = rolled_back / options.runs
        rows.append(case | {"runs": options.runs, "rolled_back": rolled_back, "share": share, "low": low, "high": high})
    options.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
