"""Tau of every candidate of a sweep against its baseline's, with an interval: a percentile bootstrap over
conversations, which begin alike for both. From the raw counts that the sweep left in MLflow.

python docs/experiments/tau_ratios.py SWEEP [BASELINE] [--by-category] [--out FILE]

SWEEP is the run's id or name, BASELINE a trial's name (the first that drafts, where none is given). FILE takes the
counts of each conversation and what is printed, as JSON. With --by-category each category of the prompts is compared by
itself, too.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rayspec.home import tracking_uri
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import connect
from sglang_ext.whole import write_whole

Counts = dict[str, tuple[int, int]]  # of each conversation: verify steps, accepted drafts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep")
    parser.add_argument("baseline", nargs="?")
    parser.add_argument("--by-category", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sweep = find_sweep(connect(tracking_uri()), options.sweep)
    requests = {trial.name: sweep.requests(trial) for trial in sweep.run_ids}
    counts = {name: counts_of(found) for name, found in requests.items()}
    drafting = {name: found for name, found in counts.items() if any(steps for steps, _ in found.values())}
    baseline = options.baseline or next(iter(drafting), None)
    if baseline not in drafting:
        parser.error(f"BASELINE must be one of its trials that draft, {', '.join(drafting) or 'none'}; got {baseline}")
    said = compared(drafting, baseline)
    print("\n".join(f"{name}: tau {found}" for name, found in said.items()))
    by_category: dict[str, dict[str, str]] = {}
    if options.by_category:
        category_of = {r["prompt_id"]: r["category"] for r in requests[baseline]}
        for category in sorted(set(category_of.values())):
            of_it = {
                name: {prompt: count for prompt, count in found.items() if category_of[prompt] == category}
                for name, found in drafting.items()
            }
            by_category[category] = compared(of_it, baseline)
            print("\n".join(f"{category}, {name}: tau {found}" for name, found in by_category[category].items()))
    if options.out is not None:
        about = {"sweep": sweep.name, "workload": sweep.params["workload"], "tau": said}
        about |= {"tau_by_category": by_category} if by_category else {}
        text = json.dumps({**about, "steps_and_accepted_drafts_of_each_conversation": drafting})
        write_whole(options.out, f"{text}\n")


def compared(drafting: Mapping[str, Counts], baseline: str) -> dict[str, str]:
    return {
        name: f"{tau(found):.3f}, of {baseline}'s {interval(found, drafting[baseline])}"
        for name, found in drafting.items()
    }


def counts_of(requests: Iterable[Mapping[str, Any]]) -> Counts:
    steps: Counter[str] = Counter()
    drafts: Counter[str] = Counter()
    for request in requests:
        steps[request["prompt_id"]] += request["verify_steps"]
        drafts[request["prompt_id"]] += request["accepted_drafts"]
    return {prompt: (steps[prompt], drafts[prompt]) for prompt in steps}


def tau(counts: Counts) -> float:
    steps, drafts = np.array(list(counts.values())).T
    return float(1 + drafts.sum() / steps.sum())


def interval(ours: Counts, theirs: Counts) -> str:
    rows = np.array([(*ours[prompt], *theirs[prompt]) for prompt in theirs]).T

    def ratio(*columns: np.ndarray, axis: int = -1) -> np.ndarray:
        steps, drafts, other_steps, other_drafts = (column.sum(axis=axis) for column in columns)
        return (1 + drafts / steps) / (1 + other_drafts / other_steps)

    if rows.shape[1] == 1:
        return f"{float(ratio(*rows)):.3f}, 1 conversation"
    found = stats.bootstrap(
        rows, ratio, paired=True, vectorized=True, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return f"{float(ratio(*rows)):.3f} [{found.low:.3f}, {found.high:.3f}], {rows.shape[1]} conversations"


if __name__ == "__main__":
    main()
