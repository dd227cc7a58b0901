"""How often does the canary refuse a version for its tau? Simulated answers to its prompts, judged by
`rayspec.serving.canary` itself.

python docs/experiments/canary_error_rates.py --out FILE [--runs 250]

Each prompt has an acceptance of its own, normally distributed, and each of its tokens is drafted right with that
chance. What is served drafts a share of these tokens wrong, such that its tau is lower by `loss` (in the mean over
chance: a sample's own differs). `by`: what its tau is held against, the counts of a sweep that asked the same prompts,
or a running version of the same tau, with drafts of its own, where nobody asked. FILE gets the shares of refusals with
95% Clopper-Pearson intervals.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import optimize, stats
from tqdm import tqdm

from rayspec.provenance import provenance
from rayspec.records import CanaryAnswer
from rayspec.serving.canary import Answer, CanaryBounds, refusal
from rayspec.serving.record import ServingRecord
from rayspec.workloads.canary import CANARY_PROMPTS, CANARY_TOKENS

DRAFTS = 4
ACCEPTANCES = (0.35, 0.55, 0.7)  # means over prompts: tau about 1.5, 2.1 and 2.8
SPREADS = (0.05, 0.12)  # standard deviations between prompts
LOSSES = (0.0, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2)
HELD_AGAINST = ("its sweep", "the running version")
EVIDENCE = {"tau": "2.0", "target": "t", "workload": "w", "temperature": "0"}
RECORD = ServingRecord(head="full", target="t", target_sha256="0", files={}, flags={}, evidence=EVIDENCE)
TAU_ALONE = CanaryBounds(drafts_of_evidence=0.0)  # without the bound by what its evidence promises on other prompts


def tau(acceptances_P: np.ndarray) -> float:
    """Of answers of one length: tokens over steps."""
    return 1 / float(np.mean(1 / sum(acceptances_P**i for i in range(DRAFTS + 1))))


def drafted(rng: np.random.Generator, acceptances_P: np.ndarray) -> np.ndarray:
    """Whether each token of each answer is drafted right."""
    return rng.random((len(acceptances_P), CANARY_TOKENS)) < acceptances_P[:, None]


def answers(right_PL: np.ndarray) -> list[Answer]:
    found = []
    for right_L in right_PL:
        at, steps, accepted = 1, 0, 0  # the prefill gives the first token
        while at < CANARY_TOKENS:
            drafts = int(np.cumprod(right_L[at : at + DRAFTS]).sum())
            at, steps, accepted = at + drafts + 1, steps + 1, accepted + drafts
        found.append(Answer(output_ids=(1,), verify_steps=steps, accepted_drafts=accepted))
    return found


def noted(answered: list[Answer]) -> tuple[CanaryAnswer, ...]:
    return tuple(CanaryAnswer.of(prompt, a) for prompt, a in zip(CANARY_PROMPTS, answered, strict=True))


def is_refused(rng: np.random.Generator, mean: float, spread: float, loss: float, by: str) -> bool:
    acceptances_P = np.clip(rng.normal(mean, spread, len(CANARY_PROMPTS)), 0.02, 0.97)
    wanted = (1 - loss) * tau(acceptances_P)
    kept = optimize.brentq(lambda share: tau(share * acceptances_P) - wanted, 0.001, 1.0) if loss else 1.0
    as_measured = drafted(rng, acceptances_P)
    new = answers(as_measured & (rng.random(as_measured.shape) < kept))
    running = answers(drafted(rng, acceptances_P))
    record = replace(RECORD, canary=noted(answers(as_measured))) if by == HELD_AGAINST[0] else RECORD
    return refusal(new, running, record, RECORD, TAU_ALONE) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=250)
    options = parser.parse_args()
    cases = [
        (by, mean, spread, loss) for by in HELD_AGAINST for mean in ACCEPTANCES for spread in SPREADS for loss in LOSSES
    ]
    rows = []
    for by, mean, spread, loss in tqdm(cases, unit=" cases"):
        refused = sum(
            is_refused(np.random.default_rng([run, 5]), mean, spread, loss, by) for run in range(options.runs)
        )
        low, high = stats.binomtest(refused, options.runs).proportion_ci()
        rows.append(
            {"by": by, "acceptance": mean, "spread": spread, "loss": loss, "runs": options.runs, "refused": refused}
            | {"share": refused / options.runs, "low": low, "high": high}
        )
    options.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
