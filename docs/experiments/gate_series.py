"""Real gates of a drafter against itself, or against a worse one, one after the other on one engine, each as if it were
alone; or of two servers.

PYTHONPATH=.:tests python docs/experiments/gate_series.py --out FILE [--runs 10] [--minutes 10]
    [--slower 0.05 | --noise 0.01 | --against ADDRESS] DRAFTER_OR_ADDRESS [key=value ...]

`--slower`: the candidate is a copy whose speed is lower by this share, since each pass of the engine sleeps
(slow_drafter.py). `--noise`: a copy with noise in its matrices, normal, of this share of a matrix's standard deviation.
FILE gets the finding of each gate with its measured blocks, which gate_error_rates.py takes as noise. Where it has some
already, of the same drafters and settings, the series goes on.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollover_world import add_noise
from scipy import stats
from slow_drafter import SLOW, install

from rayspec.config import load_config
from rayspec.gate.config import GateConfig
from rayspec.gate.engines import prepare_drafters, running_drafters
from rayspec.gate.report import Finding, find, text
from rayspec.gate.rounds import Gate
from rayspec.gate.run import EndpointOptions, run_gate
from rayspec.provenance import provenance
from rayspec.shipped import drafter_path
from sglang_ext.whole import write_whole

OneGate = Callable[[GateConfig], tuple[Finding, Gate]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10, help="of measuring, in each")
    worse = parser.add_mutually_exclusive_group()
    worse.add_argument("--slower", type=float, default=0.0)
    worse.add_argument("--noise", type=float, default=0.0)
    worse.add_argument("--against", metavar="ADDRESS", help="of another server; the first one is an address, too")
    parser.add_argument("drafter")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args()
    asked = {"drafter": options.drafter, "settings": sorted(options.overrides), "minutes": options.minutes}
    asked |= {name: getattr(options, name) for name in ("slower", "noise", "against") if getattr(options, name)}
    if not 0 <= options.slower < 1:
        parser.error(f"--slower must be a share below 1, got {options.slower}")
    runs, config = runs_before(options.out, asked), load_config(GateConfig, None, options.overrides)
    if len(runs) >= options.runs:
        print(f"{options.out} has {len(runs)} runs already")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (servers if options.against else drafters)(options, config) as one_gate:
        for seed in range(len(runs), options.runs):
            finding, gate = one_gate(replace(config, seed=seed))
            print(f"run {seed}\n{text(finding)}", flush=True)
            blocks = [[(side, round(s, 4), tokens) for side, s, tokens in b] for b in gate.measured.rounds]
            runs.append({"measured_by": provenance(), **asdict(finding), "blocks": blocks})
            write_whole(options.out, json.dumps(summary(asked, runs)) + "\n")


@contextmanager
def drafters(options: argparse.Namespace, config: GateConfig) -> Iterator[OneGate]:
    with TemporaryDirectory() as place:
        candidate = made_worse(options, Path(place)) if options.slower or options.noise else options.drafter
        sides = prepare_drafters(config, [options.drafter, candidate])
        with running_drafters(*sides, options.out.with_suffix(".logs")) as running:

            def one_gate(config: GateConfig) -> tuple[Finding, Gate]:
                begin = time.monotonic()
                gate = Gate(config, running, sides[0].prepared.prompts, has_tau=True)
                gate.run(begin + 60 * options.minutes)
                return find(gate, compares=True, seconds=time.monotonic() - begin), gate

            yield one_gate


@contextmanager
def servers(options: argparse.Namespace, config: GateConfig) -> Iterator[OneGate]:
    def one_gate(config: GateConfig) -> tuple[Finding, Gate]:
        asked = replace(config, max_minutes=options.minutes)
        sources = [options.drafter, options.against]
        return run_gate(asked, sources, [EndpointOptions()] * 2, time.monotonic() + 60 * options.minutes)

    yield one_gate


def runs_before(file: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    stored = json.loads(file.read_text())
    if stored.get("asked") != asked:
        raise SystemExit(f"{file} is of {stored.get('asked', 'an earlier form')}, not of {asked}; take another --out")
    return stored["runs"]


def made_worse(options: argparse.Namespace, place: Path) -> str:
    """The folder of the candidate, a copy of the drafter."""
    copy = place / (SLOW if options.slower else "noisy")
    shutil.copytree(drafter_path(options.drafter), copy)
    if options.slower:
        os.environ |= install(place, slowdown=1 / (1 - options.slower) - 1)
    else:
        add_noise(copy, options.noise)
    return str(copy)


def summary(asked: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(str(run["verdict"]) for run in runs)
    found = stats.binomtest(counts["regression"], len(runs)).proportion_ci(0.95)
    head = {"command": " ".join(["python", *sys.argv]), "asked": asked, "verdicts": counts}
    return {**head, "share_of_regressions": [found.low, found.high], "runs": runs}


if __name__ == "__main__":
    main()
