"""Searches on Ray Tune, over engines that answer at once."""

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from fake_sweep import fake_sweep, here, main
from fixture_models import DRAFTERS, PROMPTS, TARGET
from mlflow import MlflowClient

from rayspec.sweep.measure.optuna_search import OptunaCohorts
from rayspec.sweep.measure.search import chosen
from rayspec.sweep.plan.prepare import prepare
from rayspec.sweep.record.events import CohortEnded, RoundMeasured
from rayspec.sweep.record.folder import sweep_folders
from rayspec.sweep.record.journal import read
from rayspec.sweep.record.measured import SweepState

ROOT = Path(__file__).parents[2]
SAMPLES = 6
SEARCH = ["draft_steps=[2,4]", "repeats=3", "search.early_stop.grace_passes=1", "search.algorithm=optuna"]
SEARCH += [f"search.samples={SAMPLES}"]


def test_random_search_takes_some_by_seed() -> None:
    def names(seed: int) -> list[str]:
        overrides = ["draft_steps=[2,4]", "search.algorithm=random", "search.samples=5", f"seed={seed}"]
        prepared = fake_sweep(10, overrides)
        return [c.name for c in chosen(prepared.config, prepared.plan, SweepState(prepared.plan))]

    assert len(set(names(0))) == 5
    assert names(0) == names(0)
    assert names(0) != names(1)


def test_more_samples_than_candidates_are_refused() -> None:
    config = fake_sweep(2, ["search.algorithm=random", "search.samples=3", f"workload={PROMPTS}:4"]).config

    real = replace(config, target=str(TARGET), drafters=[str(DRAFTERS[kind]) for kind in ("full", "slimspec", "int4")])
    with pytest.raises(ValueError, match=r"search.samples must be at most the number of candidates, 2 .*, got 3"):
        prepare(real)


def test_optuna_suggests_every_candidate_once_and_begins_where_it_was() -> None:
    plan = fake_sweep(4, ["draft_steps=[2,4]", "search.algorithm=optuna", "search.samples=8"]).plan
    search = OptunaCohorts(plan.cohorts, ["s4-d3", "s2-d1"], "full", 0, "gain")
    found = []
    for i in range(len(plan.cohorts)):
        suggestion = search.suggest(str(i))
        assert suggestion is not None
        found.append(suggestion["cohort"])
        search.on_trial_complete(str(i), {"gain": float(i)}, error=i == 2)
    assert found[:2] == ["s4-d3", "s2-d1"]
    assert sorted(found) == sorted(c.name for c in plan.cohorts)


def start(home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "tests/rayspec/fake_sweep.py", f"--home={home}", *arguments]
    inherited = {k: v for k, v in os.environ.items() if k not in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**inherited, "PYTHONPATH": path, "FAKE_BLOCK_S": "0.05", **variables}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


E = TypeVar("E")


def events(home: Path, kind: type[E]) -> list[E]:
    return [e for f in sweep_folders(home) for e in read(f.journal) if isinstance(e, kind)]


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "killed"])
def test_a_search_goes_on_as_if_nothing_had_happened(is_killed: bool, tmp_path: Path) -> None:
    before, arguments = list[RoundMeasured](), ["--candidates=6", f"--home={tmp_path}", *SEARCH]
    if is_killed:
        search = start(tmp_path, "--candidates=6", *SEARCH)
        deadline = time.monotonic() + 600
        while len(events(tmp_path, CohortEnded)) < 2:
            assert search.poll() is None, search.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        search.kill()
        search.communicate()
        before = events(tmp_path, RoundMeasured)
        arguments.append("--resume")
    with here():
        main(arguments)
    rounds = events(tmp_path, RoundMeasured)
    assert rounds[: len(before)] == before
    assert len({e.index for e in rounds}) == len(rounds)
    ended = [e.cohort for e in events(tmp_path, CohortEnded)]
    assert len(set(ended)) == len(ended) == SAMPLES
    passes = Counter(e.cohort for e in rounds)
    assert max(passes.values()) == 3 * 4
    assert min(passes.values()) == 4, "some candidate was given up after its first pass"
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("rayspec-sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert {r.info.status for r in runs} == {"FINISHED"}
    names = [r.info.run_name for r in runs]
    assert len(set(names)) == len(names)
    given_up = {r.info.run_name for r in runs if "given_up" in r.data.tags}
    assert given_up
    for run in runs:
        for key in run.data.metrics:
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert len(set(steps)) == len(steps), f"{run.info.run_name}: {key}"


@pytest.mark.slow
def test_a_cohort_whose_actor_dies_again_and_again_fails_alone(tmp_path: Path) -> None:
    settings = ["draft_steps=[2]", "search.candidates_per_cohort=1", "ray.max_failures=1"]
    sweep = start(tmp_path, "--candidates=2", *settings, FAKE_KILLER="d1")
    output = sweep.communicate(timeout=600)[0]
    assert sweep.returncode == 0, output
    assert "the actor of cohort s2-d1 or its node died; it goes on where its journal ends" in output
    assert {e.cohort: e.reason for e in events(tmp_path, CohortEnded)} == {"s2-d1": "failed", "s2-d2": "measured"}
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("rayspec-sweep")
    assert experiment is not None
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    failed = {name for name, r in runs.items() if r.info.status == "FAILED"}
    assert failed == {"d1-s2-c1"}, "plain decoding and the baseline were measured in the other cohort"
    error = runs["d1-s2-c1"].data.tags["error"]
    assert error.startswith("the cohort s2-d1 failed 2 times, the last time with The actor died"), error
