"""Sweeps of as many trials as one likes, without an engine: for tests of the scheduling, and for docs/scale.md.

PYTHONPATH=.:tests python tests/rayspec/fake_sweep.py --candidates 500 --home FOLDER [--resume] [key=value ...]

prints a JSON line with what the sweep cost beside measuring, which takes no time here.
"""

import argparse
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from fixture_models import DRAFTERS, TARGET
from synthetic import synthetic_request

from rayspec.config import load_config
from rayspec.farm.load import Load
from rayspec.job import set_up
from rayspec.records import Measured
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.measure.trainable import CohortTrainable
from rayspec.sweep.plan.placement import Placement
from rayspec.sweep.plan.prepare import Prepared
from rayspec.sweep.plan.trials import make_plan
from rayspec.sweep.record.folder import SweepFolder, find_resumable
from rayspec.workloads import Conversation


class FakeEngine:
    """Answers at once, with times of a known distribution: candidate n of N is faster the larger n."""

    is_alive = True

    def __init__(self, gain: float, draft_steps: int) -> None:
        self.gain = gain
        self.draft_steps = draft_steps

    def warm_up(self, load: Load) -> None: ...

    def measure(self, load: Load) -> Measured:
        rng = np.random.default_rng(load.arrival_seed)
        cycle_s = 0.01 * float(np.exp(rng.normal(0, 0.02))) / self.gain
        histogram = (0,) * self.draft_steps + (8,) if self.draft_steps else ()
        requests = tuple(synthetic_request(p.id, histogram, cycle_s, category=p.category) for p in load.prompts)
        if os.environ.get("FAKE_BLOCK_S"):
            time.sleep(float(os.environ["FAKE_BLOCK_S"]))
        return Measured(wall_s=sum(r.e2e_s for r in requests), requests=requests)


class FakeEngines:
    """The interface of rayspec.sweep.measure.engines.Engines."""

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates
        self.placement = Placement(num_cpus=0, num_gpus=0)
        self.plain = FakeEngine(1.0, 0)
        self.speculative: FakeEngine | None = None

    def begin_plain(self, cohort: Any) -> None: ...

    def wait_for_plain(self) -> None: ...

    def has_speculative(self, cohort: Any) -> bool:
        return self.speculative is not None and self.speculative.draft_steps == cohort.draft_steps

    def start_speculative(self, cohort: Any, candidate: Candidate) -> dict[str, Any]:
        self.speculative = FakeEngine(1.0, cohort.draft_steps)
        return {"seconds": time.time(), "machine": {}}

    def use(self, candidate: Candidate | None) -> FakeEngine:
        if candidate is None:
            return self.plain
        assert self.speculative is not None
        if candidate.label == os.environ.get("FAKE_KILLER"):
            os.kill(os.getpid(), signal.SIGKILL)
        number = 0 if candidate.label == "full" else int(candidate.label[1:])
        self.speculative.gain = 1 + number / self.num_candidates
        return self.speculative

    def load(self, prompts: tuple[Conversation, ...], traffic: Any, **options: Any) -> Load:
        seed = options.get("arrival_seed", 0)
        return Load(
            prompts=prompts, traffic=traffic, max_new_tokens=2, temperature=0, ignore_eos=False, arrival_seed=seed
        )

    def stop(self) -> None: ...


class FakeTrainable(CohortTrainable):
    def make_engines(self, prepared: Prepared, placement: Placement, log_folder: Path) -> Any:
        return FakeEngines(len({c.label for c in prepared.plan.candidates}) - 1)


def fake_sweep(num_candidates: int, overrides: list[str]) -> Prepared:
    """`full` and drafters d1 ... dN, all of the full drafter's files."""
    names = ["full", *(f"d{i}" for i in range(1, num_candidates + 1))]
    own = [
        "head_latency=false",
        "canary=false",
        "block_prompts=1",
        "ray.num_cpus=0.001",
        f"drafters=[{','.join(names)}]",
        *overrides,
    ]
    config = load_config(SweepConfig, None, own)
    path = str(DRAFTERS["full"])
    candidates = [
        Candidate(label=name, path=path, head=Head(kind="full"), draft_steps=steps)
        for steps in config.draft_steps
        for name in names
    ]
    prompts = tuple(Conversation(id=str(i), category="fake", turns=(f"prompt {i}",)) for i in range(4))
    plan = make_plan(config, len(prompts), candidates)
    return Prepared(config=config, prompts=prompts, target=str(TARGET), plan=plan)


@contextmanager
def here(**variables: str) -> Iterator[None]:
    """For `main` in this process: these variables are Ray's workers', too, and all that it changes is put back."""
    folder = Path(__file__).parent
    path = os.pathsep.join([*map(str, (folder, folder.parent, folder.parents[1])), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_TRACKING_") and k != "RAY_ADDRESS"}
    on_terminate = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ, {**kept, "PYTHONPATH": path, **variables}, clear=True):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, on_terminate)


def main(arguments: list[str]) -> None:
    from rayspec.driver.controller import run_sweep

    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, required=True)
    parser.add_argument("--home", required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    os.environ["RAYSPEC_HOME"] = options.home
    set_up()
    prepared = fake_sweep(options.candidates, options.overrides)
    home = Path(options.home)
    folder = find_resumable(home) if options.resume else SweepFolder.create(home, prepared, "fake")
    start = time.perf_counter()
    outcome = run_sweep(prepared, folder, FakeTrainable)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cost = {"trials": len(outcome.results), "seconds": round(time.perf_counter() - start, 1)}
    print(
        json.dumps({**cost, "driver_peak_mib": round(peak_mib), "journal_mib": folder.journal.stat().st_size / 2**20})
    )


if __name__ == "__main__":
    main(sys.argv[1:])
