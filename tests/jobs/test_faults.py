"""kill -9 in the middle of real sweeps: of the engine's scheduler, an actor, the driver, a Ray node, the MLflow server.

Two sweeps, each of which meets its faults one after the other: starts of engines are what takes the time. After every
fault measuring must go on, by itself or after `--resume`; at the end nothing is lost, doubled or left running.
"""

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
from fixture_models import PROMPTS as HELD_OUT
from servers import start_mlflow, two_ray_nodes
from sweeps import SETTINGS, Sweep, assert_complete_and_once, title_of

from rayspec.farm.processes import has_ended
from rayspec.serving.process import free_port

pytestmark = pytest.mark.slow
PROMPTS, PASSES = 6, 4
OWN = [*SETTINGS, f"workload={HELD_OUT}:{PROMPTS}", f"repeats={PASSES}", "name=faults"]


@pytest.fixture(scope="module")
def one_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    """A sweep with a real MLflow server that goes away and comes back, and whose processes die one after the other."""
    folder = tmp_path_factory.mktemp("faults")
    store, port = f"sqlite:///{folder}/mlflow.db", free_port()
    server = start_mlflow(store, folder, port)
    sweep = Sweep(home=folder / "home", uri=f"http://127.0.0.1:{port}")
    try:
        sweep.start(*OWN)
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
            sweep.start(*OWN, "repeats=2")
            sweep.wait_for_rounds(2)

            def node() -> None:
                raylets = [psutil.Process(n.all_processes["raylet"][0].process.pid) for n in nodes]
                busy = next(
                    r for r in raylets if any("RuntimeShell" in title_of(p) for p in r.children(recursive=True))
                )
                busy.kill()
                busy.wait()  # workers take a raylet that nobody has waited for as alive

            sweep.survive("Ray node", node)
            sweep.finish()
            yield sweep
        finally:
            sweep.process.kill()


VICTIMS = {"one_machine": ["scheduler", "runtime actor", "driver", "MLflow server"], "two_nodes": ["Ray node"]}


@pytest.mark.parametrize(("sweep", "victim"), [(s, v) for s, victims in VICTIMS.items() for v in victims])
def test_measuring_goes_on_after_the_fault(sweep: str, victim: str, request: pytest.FixtureRequest) -> None:
    before, after = request.getfixturevalue(sweep).survived[victim]
    assert 0 < before < after


@pytest.fixture(params=VICTIMS)
def survivor(request: pytest.FixtureRequest) -> Sweep:
    return request.getfixturevalue(request.param)


def test_nothing_is_lost_and_nothing_is_doubled(survivor: Sweep) -> None:
    assert_complete_and_once(survivor, survivor.folder, PROMPTS * survivor.folder.config().repeats)


def test_a_dead_driver_leaves_no_process(one_machine: Sweep) -> None:
    # Ray's agents look for their control service for a minute before they give up
    _, left = psutil.wait_procs(one_machine.orphans, timeout=120)
    assert [p for p in left if not has_ended(p)] == []


def test_a_sweep_that_ended_is_not_resumed(one_machine: Sweep) -> None:
    one_machine.start("--resume", one_machine.folder.id)
    assert one_machine.process.wait() == 2
    assert f"sweep {one_machine.folder.id} has ended, so nothing to resume" in one_machine.said
