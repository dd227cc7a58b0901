"""How the measured gain of each head over a sweep's baseline compares with three predictions, from what the sweep left
in MLflow: the report's (tau, and the head asked alone), one with the step as the engine took it, and that one with
the time to the first tokens, which no draft shortens.

python docs/experiments/predicted_gains.py SWEEP [--out FILE]

For a sweep of one stream whose answers are the same with every head. SWEEP is the run's id or name.
"""

import argparse
import json
from pathlib import Path

from rayspec.home import tracking_uri
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import connect
from sglang_ext.whole import write_whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sweep = find_sweep(connect(tracking_uri()), options.sweep)
    if {result.trial.traffic.concurrency for result in sweep.results} != {1}:
        parser.error("SWEEP must be of one stream: with more, first tokens come while others decode")
    baselines = [r for r in sweep.results if r.is_baseline and "speedup_vs_baseline_predicted" in r.metrics]
    if len(baselines) != 1:
        parser.error("SWEEP must have one baseline with a prediction: one draft length, and head_latency: true")
    (baseline,) = baselines
    full = baseline.metrics
    first_tokens_s = sum(request["ttft_s"] for request in sweep.requests(baseline.trial))
    first_share = first_tokens_s / full["wall_s"]
    rows = []
    for result in sweep.results:
        found = result.metrics
        if result.is_baseline or "cycle_ms" not in found:
            continue
        by_step = found["tau"] / full["tau"] * full["cycle_ms"] / found["cycle_ms"]
        rows.append(
            {
                "trial": result.trial.name,
                "measured": round(found["speedup_vs_baseline"], 3),
                "ci": [round(found[f"speedup_vs_baseline_ci_{end}"], 3) for end in ("low", "high")],
                "predicted": round(found["speedup_vs_baseline_predicted"], 3),
                "by_step": round(by_step, 3),
                "by_step_and_first_tokens": round(1 / (first_share + (1 - first_share) / by_step), 3),
                "head_alone_ms": round(found["head_latency_us"] / 1000, 3),
                "head_in_step_ms": round(found["step_head_ms"] / result.trial.draft_steps, 3),
            }
        )
        print(rows[-1])
    for name in ("predicted", "by_step", "by_step_and_first_tokens"):
        errors = [abs(row[name] / row["measured"] - 1) for row in rows]
        print(f"{name}: {sum(errors) / len(errors):.3f} off in the mean, {max(errors):.3f} at most")
    if options.out is not None:
        write_whole(
            options.out,
            json.dumps({"sweep": sweep.name, "first_tokens_share": first_share, "heads": rows}, indent=1) + "\n",
        )


if __name__ == "__main__":
    main()
