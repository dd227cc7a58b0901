"""Bad settings by the hundred, as a hostile and a clumsy user would give them: every one is refused with exit status 2
and a message that names what is wrong; none is a traceback, none hangs, none is accepted in silence.

Jobs are called by their own `main` in this process. `hostile.py` makes wrong values for every setting of every config
by its type; what follows from meaning stands in tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_values import cases_of
from hostile import JOBS, JSON_TEXTS, Case, ask, base, complaints, wrong_settings
from small_world import World
from volume import volume

from rayspec.calibration.config import CalibrationConfig
from rayspec.export import ExportConfig
from rayspec.gate.config import GateConfig
from rayspec.sweep.config import SweepConfig
from rayspec.training.drafter_config import DrafterTrainConfig

pytestmark = pytest.mark.usefixtures("untouched_home")


@pytest.mark.parametrize("job", JOBS)
def test_what_is_broken_here_is_in_order_otherwise(job: str, world: World, place: Path) -> None:
    answer = ask(job, *base(job, world, place))
    assert (answer.code, answer.trouble) == (0, None), answer


SCHEMAS: dict[str, tuple[type, tuple[str, ...]]] = {
    "sweep": (SweepConfig, ()),
    "train": (DrafterTrainConfig, ()),
    "calibrate": (CalibrationConfig, ()),
    "export": (ExportConfig, ()),
    "gate": (GateConfig, ()),
}


@pytest.mark.parametrize("job", JOBS)
def test_every_setting_with_every_wrong_value(job: str, world: World, place: Path) -> None:
    schema, may_be_negative = SCHEMAS[job]
    cases = list(wrong_settings(schema, may_be_negative))
    assert len(cases) >= {"export": 7, "calibrate": 80, "gate": 100}.get(job, 150)
    found = complaints(job, base(job, world, place), cases[:: volume(1, 7)])
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


@pytest.mark.parametrize("job", JOBS)
def test_values_that_make_no_sense(job: str, world: World, place: Path) -> None:
    cases = cases_of(job, world, place)
    found = complaints(job, base(job, world, place), cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def test_the_suite_of_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for name, text in {**JSON_TEXTS, "object": b"{}", "odd": b'{"provenance": 3}', "number": b"3"}.items():
        (tmp_path / name).mkdir()
        for file in ("results.json", "engines.json"):
            (tmp_path / name / file).write_bytes(text)
    stored = [tmp_path / name for name in (*JSON_TEXTS, "object", "odd", "number")]
    cases: list[Case] = [
        *((["--report", str(folder)], ("--report",)) for folder in (tmp_path / "none", tmp_path / "file", *stored)),
        *((["--engines", "--report", str(folder)], ("--report",)) for folder in stored),
        (["--ops", "nonsense"], ("--ops",)),
        (["--ops"], ("--ops",)),
        (["--interpret", "--ops", "head_topk", "--out", str(tmp_path / "file")], ("file",)),
        (["--interpret", "--ops", "head_topk", "--out", str(tmp_path / "file" / "below")], ("file",)),
        (["--tau", "full=3"], ("--tau must be given with --engines",)),
        (["--shape", "tiny"], ("--shape must be given with --engines",)),
        (["--batches", "1"], ("--batches must be given with --engines",)),
        (["--engines", "--shape", "nonsense"], ("--shape must be one of",)),
        (["--engines", "nonsense", "--shape", "tiny"], ("--engines must be of",)),
        (["--engines", "--shape", "tiny", "--tau", "nonsense=2"], ("--tau must be of",)),
        *((["--engines", "--tau", x], ("--tau",)) for x in ("full", "full=", "=2", "full=x")),
        *((["--engines", "--tau", f"full={x}"], ("--tau",)) for x in ("0.5", "nan", "inf", "-1")),
        *((["--engines", "--batches", x], ("--batches",)) for x in ("0", "-1", "x", "1.5", "9" * 30)),
        *((["--engines", "--limit-seconds", x], ("--limit-seconds",)) for x in ("0", "-1", "x")),
        *((["--engines", "--server-args", x], ("--server-args",)) for x in ("triton", "=1", "attention_backnd=triton")),
        (["--server-args", "attention_backend=triton"], ("--server-args",)),
        (["--engines", "--interpret"], ("--interpret",)),
        (["--engines", "--ops", "head_topk"], ("--ops",)),
        (["--report", str(tmp_path), "--out", str(tmp_path)], ("--report", "--out")),
        (["--report", str(tmp_path), "--interpret"], ("--report", "--interpret")),
        (["--nonsense"], ("--nonsense",)),
    ]  # fmt: skip
    found = complaints("gpu_suite", [], cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def test_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = [
        (["--model", "x"], ("--promote",)),
        (["--traffic", "c1"], ("--promote",)),
        (["--force"], ("--promote",)),
        (["--nonsense"], ("--nonsense",)),
        (["--sweep"], ("--sweep",)),
        (["positional"], ("positional",)),
    ]
    found = complaints("report", [], cases)
    for uri in ("nonsense://x", "nonsense", "http://", "sqlite://", "postgresql://", "\0", "://"):
        if "\0" not in uri:  # which no variable can hold
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            found += [f"{uri}: {c}" for c in complaints("report", [], [([], ("MLFLOW_TRACKING_URI",))])]
    assert not found, f"{len(found)}\n" + "\n".join(found)
