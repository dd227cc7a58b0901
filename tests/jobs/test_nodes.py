"""An engine over two Ray nodes: tensor-parallel ranks of target and drafter in actors on both, swapped and measured as
one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import two_ray_nodes
from test_sweep import SMALL, Sweep, sweep

from rayspec.sweep.record.metric_names import metric_name

pytestmark = pytest.mark.slow
TRIALS = ["plain-c2", "full-s2-c2", "slimspec-r32-s2-c2"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    home = tmp_path_factory.mktemp("nodes") / "home"
    settings = ["draft_steps=[2]", "concurrency=[2]", "head_latency=false"]
    settings += ["engine.nodes=2", "engine.extra.tp_size=2", "engine.num_threads=1"]
    with two_ray_nodes() as (variables, _):
        yield Sweep(sweep(home, *settings, *SMALL, **variables), home)


def test_every_trial_is_measured(finished: Sweep) -> None:
    assert finished.process.returncode == 0, finished.process.stderr
    assert {name: run.info.status for name, run in finished.children.items()} == dict.fromkeys(TRIALS, "FINISHED")
    for name in TRIALS[1:]:
        metrics = {metric_name(key): value for key, value in finished.children[name].data.metrics.items()}
        assert metrics["output_mismatches"] == 0
        assert metrics["tau"] > 1.5


def test_each_engine_ran_on_both_nodes(finished: Sweep) -> None:
    logs = finished.artifact(finished.parent, "logs")
    assert {file.name for file in logs.iterdir()} == {
        f"s2.{engine}{node}.log" for engine in ("plain", "full") for node in ("", ".node1")
    }
    for file in logs.glob("*.node1.log"):
        assert " TP1] " in file.read_text()


def test_more_nodes_than_there_are_end_the_sweep_at_once(tmp_path: Path) -> None:
    run = sweep(tmp_path, "engine.nodes=2", "engine.extra.tp_size=2", *SMALL)
    assert run.returncode == 2
    assert "error: engine.nodes is 2, but the Ray cluster has 1 node(s); lower it" in run.stderr
