"""Does a sweep's interval say the truth? One sweep of the same head three times, on a real engine: under its own name,
as `twin`, and as `slow`, with every pass of the engine 10% longer (slow_drafter.py). The sweep is cut into
repetitions, each of which is judged alone, as if it had been the whole sweep.

python docs/experiments/aa_sweep.py --home FOLDER [--repetitions 20] [--passes 2]

writes FOLDER/aa.json and FOLDER/aa.png: of the twin, whose true speed-up is 1, how many 95% intervals hold 1; of the
slowed head, how many lie wholly below it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator
from slow_drafter import SLOW, install

from rayspec.plotting import STYLE, colour, panels, plt
from rayspec.provenance import machine, provenance
from rayspec.shipped import drafter_path
from rayspec.statistics import Interval
from rayspec.sweep.plan.prepare import prepare
from rayspec.sweep.record.folder import sweep_folders
from rayspec.sweep.record.journal import read
from rayspec.sweep.record.measured import SweepState
from rayspec.sweep.record.results import speedups

ROOT = Path(__file__).parents[2]
HEAD, TWIN = "full", "twin"
SLOWDOWN = 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", required=True, type=Path)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--passes", type=int, default=2, help="over the workload, in each repetition")
    options = parser.parse_args()
    home = options.home.resolve()
    sweep(home, options.repetitions * options.passes)
    intervals = judge(home, options.repetitions, options.passes)
    twin, slow = intervals[TWIN], intervals[SLOW]
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        **provenance(),
        "slowdown": SLOWDOWN,
        "repetitions": options.repetitions,
        "twin_intervals_with_1": sum(i.low <= 1 <= i.high for i in twin if i.low and i.high),
        "slow_intervals_below_1": sum(i.high < 1 for i in slow if i.high),
        "intervals": {name: [(i.low, i.value, i.high) for i in found] for name, found in intervals.items()},
    }
    (home / "aa.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(intervals, home / "aa.png")
    print(json.dumps({k: v for k, v in result.items() if k != "intervals"}))


def sweep(home: Path, passes: int) -> None:
    drafters = home / "drafters"
    original = Path(drafter_path(HEAD))
    for name in (HEAD, TWIN, SLOW):
        shutil.copytree(original, drafters / name)
    settings: dict[str, Any] = {
        "name": "aa",
        "drafters": f"[{','.join(str(drafters / name) for name in (HEAD, TWIN, SLOW))}]",
        "baseline": HEAD,
        "workload": "chat:8",
        "block_prompts": 1,
        "repeats": passes,
        "max_new_tokens": 32,
        "head_latency": "false",
        "engine.num_threads": 1,
        "engine.context_length": 1024,
        "engine.max_total_tokens": 16384,
    }
    subprocess.run(
        [sys.executable, "jobs/sweep.py", *(f"{k}={v}" for k, v in settings.items())],
        cwd=ROOT,
        env={**os.environ, "RAYSPEC_HOME": str(home), **install(home, SLOWDOWN)},
        check=True,
    )


def judge(home: Path, repetitions: int, passes: int) -> dict[str, list[Interval]]:
    """The speed-ups of `twin` and `slow` over the original in each repetition."""
    folder = sweep_folders(home)[0]
    prepared = prepare(folder.config())
    state = SweepState(prepared.plan, read(folder.journal))
    rounds = passes * len(prepared.plan.spans) * len(prepared.plan.traffic)
    found: dict[str, list[Interval]] = {TWIN: [], SLOW: []}
    for repetition in range(repetitions):
        own = range(repetition * rounds, (repetition + 1) * rounds)
        blocks = {t: [b for b in measured if b.index in own] for t, measured in state.blocks.items()}
        for trial in blocks:
            if trial.label in found:
                found[trial.label].append(speedups(prepared.config, trial, blocks, {})["full"])
    return found


def draw(intervals: dict[str, list[Interval]], file: Path) -> None:
    with plt.rc_context(STYLE):
        figure, (axis,) = panels(1, width=7, height=3.6)
        for i, (name, found) in enumerate(intervals.items()):
            values = [f.value for f in found]
            spread = [[f.value - (f.low or f.value) for f in found], [(f.high or f.value) - f.value for f in found]]
            label = {TWIN: "the same head", SLOW: f"the same head, passes {SLOWDOWN:.0%} longer"}[name]
            places = [n + 0.25 * i for n in range(1, len(found) + 1)]
            axis.errorbar(places, values, spread, fmt="o", color=colour(i), label=label, capsize=2, markersize=4)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.axhline(1, color="0.3", linewidth=1)
        axis.axhline(1 / (1 + SLOWDOWN), color=colour(1), linewidth=1, linestyle=":")
        axis.set(xlabel="repetition", ylabel="speed-up, 95% interval", title="An A/A sweep on a real engine")
        axis.legend(loc="best", fontsize=9)
        figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main()
