"""kill -9 in the middle of real sweeps: of the engine's scheduler, an actor, the driver, a Ray node, the MLflow server.

Two sweeps, each of which meets its faults one after the other: starts of engines are what takes the time. After every
fault measuring must go on, by itself or after `--resume`; at the end nothing is lost, doubled or left running.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from fixture_models import sweep_settings
from mlflow import MlflowClient
from mlflow.entities import Run
from servers import free_port, start_mlflow, two_ray_nodes

from rayspec.farm.processes import has_ended
from rayspec.sweep.folder import SweepFolder, sweep_folders
from rayspec.sweep.journal import read

ROOT = Path(__file__).parents[2]
PROMPTS, PASSES = 6, 4
ROUNDS = PROMPTS * PASSES
TRIALS = {"plain-c1", "full-s2-c1", "slimspec-r32-s2-c1"}
SETTINGS = [*sweep_settings(PROMPTS), "draft_steps=[2]", "block_prompts=1"]
SETTINGS += [f"repeats={PASSES}", "max_new_tokens=16", "head_latency=false", "name=faults"]
SETTINGS += ["engine.max_total_tokens=8192", "engine.num_threads=1"]
PATIENCE_S = 1200  # a busy machine starts engines for minutes


@dataclass
class Sweep:
    """A sweep under fire. `survived[victim]` are the rounds in the journal at the fault and some time after it."""

    home: Path
    uri: str
    variables: dict[str, str] = field(default_factory=dict)
    survived: dict[str, tuple[int, int]] = field(default_factory=dict)
    orphans: list[psutil.Process] = field(default_factory=list)  # what ran below the driver when it died

    def start(self, *arguments: str) -> None:
        own = {"RAYSPEC_HOME": str(self.home), "MLFLOW_TRACKING_URI": self.uri, **self.variables}
        inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        with (self.home.parent / "output.log").open("a") as log:
            command = [sys.executable, "jobs/sweep.py", *arguments]
            self.process = subprocess.Popen(command, cwd=ROOT, env=inherited | own, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return (self.home.parent / "output.log").read_text()

    @property
    def folder(self) -> SweepFolder:
        return sweep_folders(self.home)[0]

    def rounds(self) -> int:
        if not sweep_folders(self.home):
            return 0
        return sum(e["event"] == "round" for e in read(self.folder.journal))

    def wait_for_rounds(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.rounds() < number:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)

    def descendant(self, title: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()):
                    return process
        raise AssertionError(f"no process {title!r} below the driver")

    def survive(self, victim: str, kill: Callable[[], None]) -> None:
        """Let `kill` happen, then wait for two more rounds."""
        before = self.rounds()
        kill()
        self.wait_for_rounds(before + 2)
        self.survived[victim] = (before, self.rounds())

    def kill_driver(self) -> None:
        self.orphans = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()

    def finish(self) -> None:
        assert self.process.wait(timeout=PATIENCE_S) == 0, self.output

    def runs(self) -> list[Run]:
        client = MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("rayspec-sweep")
        assert experiment is not None, self.output
        return list(client.search_runs([experiment.experiment_id]))


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """A sweep with a real MLflow server that goes away and comes back, and whose processes die one after the other."""
    folder = tmp_path_factory.mktemp("faults")
    store, port = f"sqlite:///{folder}/mlflow.db", free_port()
    server = start_mlflow(store, folder, port)
    sweep = Sweep(home=folder / "home", uri=f"http://127.0.0.1:{port}")
    try:
        sweep.start(*SETTINGS)
        sweep.wait_for_rounds(2)
        for victim, title in (("scheduler", "sglang::scheduler"), ("runtime actor", "ray::_RuntimeShell")):
            sweep.survive(victim, sweep.descendant(title).kill)

        def driver() -> None:
            sweep.kill_driver()
            sweep.start("--resume")

        sweep.survive("driver", driver)
        sweep.survive("MLflow server", lambda: os.killpg(server.pid, signal.SIGKILL))
        server = start_mlflow(store, folder, port)  # which takes longer than the rest of the sweep
        sweep.finish()
        yield sweep
    finally:
        sweep.process.kill()
        os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """A sweep on a cluster of a head without CPUs and two nodes, of which the one that measures dies."""
    folder = tmp_path_factory.mktemp("nodes")
    with two_ray_nodes() as (variables, nodes):
        sweep = Sweep(home=folder / "home", uri=f"sqlite:///{folder}/mlflow.db", variables=variables)
        try:
            sweep.start(*SETTINGS, "repeats=2")
            sweep.wait_for_rounds(2)

            def node() -> None:
                raylets = [psutil.Process(n.all_processes["raylet"][0].process.pid) for n in nodes]
                busy = next(r for r in raylets if any("RuntimeShell" in _title(p) for p in r.children(recursive=True)))
                busy.kill()

            sweep.survive("Ray node", node)
            sweep.finish()
            yield sweep
        finally:
            sweep.process.kill()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


VICTIMS = {"one_machine": ["scheduler", "runtime actor", "driver", "MLflow server"], "two_nodes": ["Ray node"]}


@pytest.mark.parametrize(("sweep", "victim"), [(s, v) for s, victims in VICTIMS.items() for v in victims])
def test_measuring_goes_on_after_the_fault(sweep: str, victim: str, request: pytest.FixtureRequest) -> None:
    before, after = request.getfixturevalue(sweep).survived[victim]
    assert 0 < before < after


@pytest.fixture(params=VICTIMS)
def survivor(request: pytest.FixtureRequest) -> Sweep:
    return request.getfixturevalue(request.param)


def _passes(sweep: Sweep) -> int:
    return sweep.folder.config().repeats


def test_no_trial_is_lost_and_none_is_doubled(survivor: Sweep) -> None:
    events = read(survivor.folder.journal)
    measured = Counter((name, e["index"]) for e in events if e["event"] == "round" for name in e["blocks"])
    rounds = range(PROMPTS * _passes(survivor))
    assert measured == Counter({(name, index): 1 for name in TRIALS for index in rounds})
    assert not any(e["event"] == "failed" for e in events)


def test_every_run_has_ended_well(survivor: Sweep) -> None:
    status = Counter((r.info.run_name, r.info.status) for r in survivor.runs())
    assert status == Counter({(name, "FINISHED"): 1 for name in [*TRIALS, "faults"]})


def test_every_block_is_in_mlflow_once_and_no_metric_twice(survivor: Sweep) -> None:
    client = MlflowClient(survivor.uri)
    for run in survivor.runs():
        for key in run.data.metrics:
            steps = [m.step for m in client.get_metric_history(run.info.run_id, key)]
            assert len(set(steps)) == len(steps), f"{run.info.run_name}: {key}"
            if key == "per_block/wall_s":
                assert sorted(steps) == list(range(PROMPTS * _passes(survivor)))


def test_a_dead_driver_leaves_no_process(one_machine: Sweep) -> None:
    # Ray's agents look for their control service for a minute before they give up
    _, left = psutil.wait_procs(one_machine.orphans, timeout=120)
    assert [p for p in left if not has_ended(p)] == []


def test_a_sweep_that_ended_is_not_resumed(one_machine: Sweep) -> None:
    run = subprocess.run(
        [sys.executable, "jobs/sweep.py", "--resume", one_machine.folder.id],
        cwd=ROOT,
        env={**os.environ, "RAYSPEC_HOME": str(one_machine.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert f"sweep {one_machine.folder.id} has ended, so nothing to resume" in run.stderr
