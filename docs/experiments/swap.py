"""What swapping heads in a running engine saves against a fresh engine for each: python docs/experiments/swap.py

Both ways measure the same blocks of the same heads, one way after the other in turns of one head, so that a busy
machine slows both. Prints the seconds of each, their ratio, and whether the answers agree; exits 1 where they do not.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rayspec.farm.actor import RuntimeHandle, cluster
from rayspec.farm.load import Load, Traffic
from rayspec.farm.runtime import EngineSpec
from rayspec.shipped import drafter_path, target_path
from rayspec.targets.catalogue import DEFAULT_TARGET
from rayspec.workloads import load_workload

HEADS = ("full", "slimspec-r288", "slimspec-r144", "slimspec-r72")
DRAFT_STEPS = 4
TIMEOUT_S = 1200.0


@dataclass
class WallTimes:
    """Wall seconds by what they went to, and the answers' tokens of each head."""

    start_s: float = 0.0
    swap_s: float = 0.0
    measure_s: float = 0.0
    tokens: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.start_s + self.swap_s + self.measure_s


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python docs/experiments/swap.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--heads", nargs="+", default=HEADS, metavar="NAME", help="names of the default target's drafters, or folders"
    )
    parser.add_argument("--workload", default="chat:4", help="the prompts that each head answers")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    prompts = tuple(load_workload(options.workload))
    load = Load(prompts=prompts, traffic=Traffic(concurrency=4), max_new_tokens=options.max_new_tokens,
                temperature=0.0, ignore_eos=False)  # fmt: skip
    swapped, fresh = WallTimes(), WallTimes()
    with cluster(None), TemporaryDirectory() as logs:
        kept: RuntimeHandle | None = None
        for name in options.heads:
            own = _start(name, Path(logs) / f"{name}.log", fresh)
            _measure(own, name, load, fresh)
            began = time.perf_counter()
            own.stop()  # nobody needs to wait for it, but the next start would share the machine with it
            fresh.start_s += time.perf_counter() - began
            if kept is None:
                kept = _start(name, Path(logs) / "kept.log", swapped)
            else:
                began = time.perf_counter()
                kept.swap(drafter_path(name))
                swapped.swap_s += time.perf_counter() - began
            _measure(kept, name, load, swapped)
        if kept is not None:
            kept.stop()
    agree = swapped.tokens == fresh.tokens
    for name, way in (("swapped", swapped), ("fresh", fresh)):
        print(json.dumps({"way": name, **{k: round(getattr(way, k), 2) for k in ("start_s", "swap_s", "measure_s")}}))
    print(f"{len(options.heads)} heads: {fresh.total_s:.0f} s with a fresh engine each, {swapped.total_s:.0f} s with "
          f"swaps: {fresh.total_s / swapped.total_s:.1f}x; answers {'agree' if agree else 'DIFFER'}")  # fmt: skip
    return 0 if agree else 1


def _start(name: str, log: Path, way: WallTimes) -> RuntimeHandle:
    began = time.perf_counter()
    overrides = {"random_seed": 0, "context_length": 1024, "max_total_tokens": 16384}
    spec = EngineSpec(
        target=target_path(DEFAULT_TARGET), drafter=drafter_path(name), draft_steps=DRAFT_STEPS, overrides=overrides
    )
    handle = RuntimeHandle(spec, log, num_cpus=1, num_gpus=0, block_timeout_s=TIMEOUT_S)
    handle.finish_start(handle.begin_start(), TIMEOUT_S)
    way.start_s += time.perf_counter() - began
    return handle


def _measure(handle: RuntimeHandle, name: str, load: Load, way: WallTimes) -> None:
    began = time.perf_counter()
    measured = handle.measure(load)
    way.measure_s += time.perf_counter() - began
    way.tokens[name] = [r.output_ids for r in measured.requests]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
