"""Real gates of a drafter against itself, one after the other on one engine, each as if it were alone.

python docs/experiments/gate_aa.py --out FOLDER [--runs 10] [--minutes 10] DRAFTER [key=value ...]

FOLDER/aa.json gets the finding of each, with its measured blocks, which gate_error_rates.py takes as noise.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from scipy import stats

from rayspec.config import load_config
from rayspec.gate.config import GateConfig
from rayspec.gate.engines import prepare_drafters, running_drafters
from rayspec.gate.report import find, text
from rayspec.gate.rounds import Gate
from rayspec.provenance import provenance
from sglang_ext.whole import write_whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10, help="of measuring, in each")
    parser.add_argument("drafter")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    config = load_config(GateConfig, None, options.overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    baseline, candidate = prepare_drafters(config, [options.drafter, options.drafter])
    runs: list[dict[str, object]] = []
    head = {"command": " ".join(["python", *sys.argv]), **provenance()}
    with running_drafters(baseline, candidate, options.out / "logs") as sides:
        for seed in range(options.runs):
            begin = time.monotonic()
            gate = Gate(replace(config, seed=seed), sides, baseline.prepared.prompts, has_tau=True)
            gate.run(begin + 60 * options.minutes)
            finding = find(gate, compares=True, seconds=time.monotonic() - begin)
            print(f"run {seed}\n{text(finding)}", flush=True)
            runs.append({"load": provenance()["host.load_1m"], **asdict(finding), "blocks": gate.measured.rounds})
            counts = Counter(str(run["verdict"]) for run in runs)
            alarms = stats.binomtest(counts["regression"], len(runs)).proportion_ci(0.95)
            result = {**head, "verdicts": counts, "false_alarms": [alarms.low, alarms.high], "runs": runs}
            write_whole(options.out / "aa.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
