"""How often does the canary refuse a version for its tau? Simulated answers to its prompts, judged by
`rayspec.serving.canary` itself, with evidence that promises the same tau of both versions.

python docs/experiments/canary_error_rates.py --out FILE [--runs 250]

Each prompt has an acceptance of its own, normally distributed, and each next of four drafts that chance; the new
version's are lower throughout, such that its tau is lower by `loss`. FILE gets the shares of refusals with 95%
Clopper-Pearson intervals.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from scipy import optimize, stats
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.serving.canary import MAX_TOKENS, PROMPTS, Answer, CanaryBounds, refusal

DRAFTS = 4
ACCEPTANCES = (0.35, 0.55, 0.7)  # means over prompts: tau about 1.5, 2.1 and 2.8
SPREADS = (0.05, 0.12)  # standard deviations between prompts
LOSSES = (0.0, 0.05, 0.1, 0.15, 0.2)
EVIDENCE = {"tau": "2.0", "target": "t", "workload": "w", "temperature": "0"}
RATIO_ALONE = CanaryBounds(drafts_of_evidence=0.0)  # without the bound by what its evidence promises


def tau(acceptances_P: np.ndarray) -> float:
    """Of answers of one length: tokens over steps."""
    return 1 / float(np.mean(1 / sum(acceptances_P**i for i in range(DRAFTS + 1))))


def answers(rng: np.random.Generator, acceptances_P: np.ndarray) -> list[Answer]:
    found = []
    for chance in acceptances_P:
        left, steps, accepted = MAX_TOKENS - 1, 0, 0
        while left > 0:
            drafts = min(DRAFTS, int(rng.geometric(1 - chance)) - 1)
            steps, accepted, left = steps + 1, accepted + drafts, left - drafts - 1
        found.append(Answer(output_ids=(1,), verify_steps=steps, accepted_drafts=accepted))
    return found


def is_refused(rng: np.random.Generator, mean: float, spread: float, loss: float) -> bool:
    running_P = np.clip(rng.normal(mean, spread, len(PROMPTS)), 0.02, 0.97)
    wanted = (1 - loss) * tau(running_P)
    factor = optimize.brentq(lambda f: tau(np.clip(f * running_P, 0, 0.995)) - wanted, 0.001, 1.6)
    new_P = np.clip(factor * running_P, 0, 0.995)
    return refusal(answers(rng, new_P), answers(rng, running_P), EVIDENCE, EVIDENCE, RATIO_ALONE) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=250)
    options = parser.parse_args()
    cases = [(mean, spread, loss) for mean in ACCEPTANCES for spread in SPREADS for loss in LOSSES]
    rows = []
    for mean, spread, loss in tqdm(cases, unit=" cases"):
        refused = sum(is_refused(np.random.default_rng([run, 5]), mean, spread, loss) for run in range(options.runs))
        low, high = stats.binomtest(refused, options.runs).proportion_ci()
        rows.append(
            {"acceptance": mean, "spread": spread, "loss": loss, "runs": options.runs, "refused": refused}
            | {"share": refused / options.runs, "low": low, "high": high}
        )
    options.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
