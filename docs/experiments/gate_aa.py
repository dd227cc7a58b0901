"""Real gates of a drafter against itself, one after the other on one engine, each as if it were alone.

python docs/experiments/gate_aa.py --out FOLDER [--runs 10] [--minutes 10] DRAFTER [key=value ...]

FOLDER/aa.json gets the finding of each, with its measured blocks, which gate_error_rates.py takes as noise. Where it
has some already, of the same drafter and settings, the series goes on.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

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
    file = options.out / "aa.json"
    asked = {"drafter": options.drafter, "settings": sorted(options.overrides), "minutes": options.minutes}
    runs = runs_before(file, asked)
    if len(runs) >= options.runs:
        print(f"{file} has {len(runs)} runs already")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    baseline, candidate = prepare_drafters(config, [options.drafter, options.drafter])
    with running_drafters(baseline, candidate, options.out / "logs") as sides:
        for seed in range(len(runs), options.runs):
            begin = time.monotonic()
            gate = Gate(replace(config, seed=seed), sides, baseline.prepared.prompts, has_tau=True)
            gate.run(begin + 60 * options.minutes)
            finding = find(gate, compares=True, seconds=time.monotonic() - begin)
            print(f"run {seed}\n{text(finding)}", flush=True)
            runs.append({"measured_by": provenance(), **asdict(finding), "blocks": gate.measured.rounds})
            counts = Counter(str(run["verdict"]) for run in runs)
            alarms = stats.binomtest(counts["regression"], len(runs)).proportion_ci(0.95)
            found = {"verdicts": counts, "false_alarms": [alarms.low, alarms.high], "runs": runs}
            head = {"command": " ".join(["python", *sys.argv]), "asked": asked}
            write_whole(file, json.dumps({**head, **found}, indent=1) + "\n")


def runs_before(file: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    stored = json.loads(file.read_text())
    if stored.get("asked") != asked:
        raise SystemExit(f"{file} is of {stored.get('asked', 'an earlier form')}, not of {asked}; take another --out")
    return stored["runs"]


if __name__ == "__main__":
    main()
