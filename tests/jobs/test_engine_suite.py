"""The second half of the GPU suite: random models of every head, drafter and tree, some in SGLang, and the table."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from fixture_models import DRAFTERS
from hostile import ask

from rayspec.engine_suite import curves, steps
from rayspec.engine_suite.curves import draw, table
from rayspec.engine_suite.models import SHAPES, draftings, write_drafter, write_target
from rayspec.engine_suite.process import GO, ROWS
from sglang_ext.adapter.engine import BACKENDS
from sglang_ext.drafters import family
from sglang_ext.drafters.checkpoint import load_drafter

SHAPE = SHAPES["tiny"]
SUITE = Path(__file__).parents[2] / "jobs" / "gpu_suite.py"


@pytest.mark.parametrize("name", draftings(SHAPE))
def test_a_random_drafter_of_every_head_and_family(name: str, tmp_path: Path) -> None:
    drafting = draftings(SHAPE)[name]
    write_drafter(tmp_path / name, SHAPE, drafting)
    drafter, info = load_drafter(tmp_path / name)
    assert (info.kind, drafter.lm_head.at(0).kind) == (drafting.family, drafting.head["kind"])
    assert (info.tree.kind if info.tree else None) == drafting.tree
    assert all(bool(tensor.float().isfinite().all()) for tensor in drafter.state_dict().values())
    assert info.target is not None
    assert info.target.vocab_size == SHAPE.vocab
    assert len(set(info.target.tap_layers)) == {"eagle3": 3, "medusa": 0, "hydra": 0, "specformer": 4}[drafting.family]


def test_an_engine_has_the_backends_that_sglang_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of a sweep has, unless others are named."""
    monkeypatch.setattr(steps, "has_accelerator", lambda: True)
    options = Namespace(batches=[1], nodes=None, drafter=None, server_args={})
    assert not [name for name in steps._settings(options) if name in BACKENDS]
    options.server_args = {"attention_backend": "triton", "context_length": 512}
    assert steps._settings(options).items() >= options.server_args.items()


@pytest.mark.parametrize(("drafter", "captures"), [(None, False), ("full", False), ("dynaspec", True)])
def test_only_a_head_that_routes_has_prefills_captured(
    monkeypatch: pytest.MonkeyPatch, drafter: str | None, captures: bool
) -> None:
    """As a server has them by default: such a head ended it at its first captured prefill."""
    monkeypatch.setattr(steps, "has_accelerator", lambda: True)
    folder = None if drafter is None else str(DRAFTERS[drafter])
    options = Namespace(batches=[1], nodes=None, drafter=folder, server_args={})
    assert ("cuda_graph_backend_prefill" not in steps._settings(options)) == captures


def test_settings_of_the_command_reach_every_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []

    class Refused(curves.EngineProcess):
        def __init__(self, command: Any, limit_s: float, accepted: int) -> None:
            commands.append([*command, str(limit_s)])
            raise OSError("not here")

    monkeypatch.setattr(curves, "EngineProcess", Refused)
    words = ["--server-args", "attention_backend=triton", "page_size=1", "--limit-seconds", "900"]
    ask("gpu_suite", "--shape", "tiny", "--engines", "full", "--out", str(tmp_path), *words)
    assert [c[-3:] for c in commands] == 2 * [
        ["--server-args", '{"attention_backend": "triton", "page_size": 1}', "900"]
    ]


def test_every_algorithm_of_our_trees_has_an_engine() -> None:
    trees = [d for d in draftings(SHAPE).values() if d.topk > 1]
    assert {family(d.family).serving.trees[d.tree] for d in trees} == {"EAGLE3", "MEDUSA", "SLIM", "HYDRA"}
    assert [d.head["kind"] for d in trees if d.head.get("union") == "request"] == ["dynaspec"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["dynaspec", "eagle3-tree", "eagle3-slim", "dynaspec-tree", "medusa", "medusa-slim", "hydra", "specformer"],
)
def test_in_sglang(name: str, tmp_path: Path) -> None:
    """The head that needs most, which routes, and each tree and family, in a process as the suite starts it. Three
    tokens of each step are accepted, whatever the drafts are."""
    drafting = draftings(SHAPE)[name]
    write_target(tmp_path / "target", SHAPE)
    write_drafter(tmp_path / "drafter", SHAPE, drafting)
    command = curves._command(tmp_path / "target", tmp_path / "drafter", drafting, SHAPE.vocab, [2])
    (tmp_path / GO).touch()
    environment = {**os.environ, "SGLANG_SIMULATE_ACC_LEN": "3"}
    done = subprocess.run(
        [*command, "--turn", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads((tmp_path / ROWS).read_text())
    assert [row["batch"] for row in rows] == [2]
    for row in rows:
        assert row["tokens_per_step"] == pytest.approx(3, abs=0.1)
        assert 0 < row["head_ms"] < row["draft_ms"] < row["step_ms"]
        assert 0 < row["verify_ms"] < row["step_ms"]
        assert 0 < row["shortlist_mean"] <= SHAPE.vocab


ANSWERS = """
import pathlib, sys, time
turn = pathlib.Path(sys.argv[-1])
(turn / "ready").touch()
while not (turn / "go").exists():
    time.sleep(0.01)
(turn / "rows.json").write_text("[7]")
"""


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_engine_that_fails_costs_no_other_its_result(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second answers; the first ends with an error, the third never comes up, the fourth hangs when it is asked."""
    up = "import pathlib, sys; (pathlib.Path(sys.argv[-1]) / 'ready').touch()"
    scripts = {"plain": "raise SystemExit('no memory')", "full": ANSWERS, "slimspec": "import time; time.sleep(60)",
               "coral": f"{up}; import time; time.sleep(60)"}  # fmt: skip
    left = iter(scripts.values())
    monkeypatch.setattr(curves, "_command", lambda *_: [sys.executable, "-c", next(left)])
    saved: list[int] = []
    found = curves.measure_engines(
        "tiny",
        ["full", "slimspec", "coral"],
        batches=[1],
        limit_s=6,
        save=lambda f: saved.append(len(f["rows"])),
        at_once=at_once,
    )
    assert found["rows"] == {"full": [7]}
    assert "no memory" in found["failed"]["plain"]
    assert "none within 6 s" in found["failed"]["slimspec"]
    assert "none within 6 s" in found["failed"]["coral"]
    assert saved == [0, 1, 1, 1]


def test_a_head_that_cannot_be_made_is_told_though_it_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr(curves, "write_drafter", refuse)
    monkeypatch.setattr(curves, "_command", lambda *_: [sys.executable, "-c", ANSWERS])
    saved: list[list[str]] = []
    curves.measure_engines("tiny", ["full"], batches=[1], limit_s=20, save=lambda f: saved.append([*f["failed"]]))
    assert saved == [[], ["full"]]


def test_engines_are_measured_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are up before either measures, and neither measures while the other does."""
    script = """
import pathlib, sys, time
turn, name = pathlib.Path(sys.argv[-1]), sys.argv[1]
say = lambda what: open(r"PLACE", "a").write(f"{what} {name}\\n")
say("up")
(turn / "ready").touch()
while not (turn / "go").exists():
    time.sleep(0.01)
say("begins")
time.sleep(0.5)
say("ends")
(turn / "rows.json").write_text("[7]")
""".replace("PLACE", str(tmp_path / "said"))
    names = iter(["a", "b"])
    monkeypatch.setattr(curves, "_command", lambda *_: [sys.executable, "-c", script, next(names)])
    curves.measure_engines("tiny", ["full"], batches=[1], limit_s=20, save=lambda _: None, at_once=2)
    said = (tmp_path / "said").read_text().splitlines()
    assert sorted(said[:2]) == ["up a", "up b"]
    assert said[2:] == ["begins a", "ends a", "begins b", "ends b"]


def found(**failed: str) -> dict[str, Any]:
    rows = {
        "plain": [{"batch": 1, "step_ms": 4.0}],
        "full": [{"batch": 1, "step_ms": 6.0, "draft_ms": 1.5, "head_ms": 0.5, "verify_ms": 4.25}],
    }
    return {"shape": "tiny", "draft_steps": 4, "accepted": 3, "rows": rows, "failed": failed}


def test_the_table_says_when_a_head_pays(tmp_path: Path) -> None:
    lines = table(found(coral="no memory"))
    assert "| full | 1 | 6.00 | 1.50 | 0.50 | 4.25 | 0.25 | 1.50 |  |  |" in lines
    assert "| plain | 1 | 4.00 |  |  |  |  |  |  |  |" in lines
    assert "coral failed" in lines[-1]
    assert "no memory" in lines[-1]
    draw(found(), tmp_path / "engines.png")
    assert (tmp_path / "engines.png").stat().st_size > 5000


def test_the_table_says_what_attends_and_samples() -> None:
    answer = found()
    assert not [line for line in table(answer) if "backend" in line]
    for (row,) in answer["rows"].values():
        row["backends"] = {"attention_backend": "fa3", "sampling_backend": "flashinfer"}
    assert table(answer)[-1] == "\nattention_backend fa3, sampling_backend flashinfer (all engines)."
    answer["rows"]["full"][0]["backends"] = {"attention_backend": "triton"}
    assert table(answer)[-1] == "\nattention_backend triton (full)."
    answer["rows"]["full"][0]["shortlist_mean"] = 812.4
    assert "\nfull scored 812 tokens for a row at batch 1, in the mean." in table(answer)


def test_a_tau_measured_elsewhere_predicts_the_speed_up(tmp_path: Path) -> None:
    """3 tokens in 6 ms against one in 4 ms."""
    (tmp_path / "engines.json").write_text(json.dumps(found() | {"provenance": {"GPU": "none"}}))
    command = [sys.executable, SUITE, "--engines", "--shape", "tiny", "--report", tmp_path, "--tau", "full=3.0"]
    subprocess.run(command, check=True)
    assert (
        "| full | 1 | 6.00 | 1.50 | 0.50 | 4.25 | 0.25 | 1.50 | 3.0 | 2.00 |" in (tmp_path / "engines.md").read_text()
    )
    assert json.loads((tmp_path / "engines.json").read_text())["tau"] == {"full": 3.0}
    assert (tmp_path / "engines.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "wrong",
    [("--shape", "huge", "--engines"), ("--engines", "oak"), ("--tau", "oak=2", "--engines"),
     ("--tau", "full=0.5", "--engines"), ("--tau", "full", "--engines"), ("--tau", "full=3"),
     ("--at-once", "0", "--engines"), ("--at-once", "2"), ("--report", "nowhere", "--engines"),
     ("--report", "nowhere")],
)  # fmt: skip
def test_unknown_names_are_refused(wrong: tuple[str, ...], tmp_path: Path) -> None:
    answer = ask("gpu_suite", *wrong, "--out", str(tmp_path))
    assert answer.is_refusal, answer
    assert "must be" in answer.err or "leave --out out" in answer.err
    assert not list(tmp_path.iterdir())


def test_a_gpu_machine_without_the_farm_will_do() -> None:
    """SGLang's own requirements are enough: no Ray, no MLflow, no configuration files."""
    block = "import sys; sys.modules.update(dict.fromkeys(['ray', 'mlflow', 'omegaconf', 'optuna', 'matplotlib']))"
    suite = "import rayspec.engine_suite.curves, rayspec.engine_suite.models, rayspec.engine_suite.steps"
    done = subprocess.run([sys.executable, "-c", f"{block}; {suite}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
