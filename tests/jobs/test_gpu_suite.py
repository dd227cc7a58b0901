"""The suite without a GPU: results are checked in the interpreter, and a wrong one fails it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hostile import ask

from rayspec_kernels.common import ahead, bench, suite
from rayspec_kernels.common.report import report_text, speedup
from rayspec_kernels.common.shapes import MODELS, SMALL
from rayspec_kernels.grouped_rmsnorm.bench import cases

SUITE = Path(__file__).parents[2] / "jobs" / "gpu_suite.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, for which this process's kernels are compiled")
@pytest.mark.usefixtures("interpreter")
def test_interpreted_run(tmp_path: Path) -> None:
    done = ask("gpu_suite", "--interpret", "--ops", "grouped_rmsnorm", "--out", str(tmp_path))
    assert done.code == 0, done
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["checks"]) >= 9
    assert not any(check["error"] for check in results["checks"])
    assert results["timings"] == []  # an interpreter's time says nothing
    assert results["provenance"]["GPU"] == "none (interpreter)"
    assert list(results["case_s"]) == [check["name"] for check in results["checks"]]
    assert "0 wrong" in (tmp_path / "report.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(tmp_path: Path) -> None:
    done = ask("gpu_suite", "--out", str(tmp_path))
    assert done.is_refusal, done
    assert "--interpret" in done.err


@pytest.mark.usefixtures("interpreter")
def test_a_wrong_result_is_found() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = next(iter(cases(SMALL[2], 1)))
    assert bench.check(case, device) == {}
    off = bench.check(dataclasses.replace(case, kernel=lambda *inputs: case.kernel(*inputs) * 1.05), device)
    assert "of the norm, allowed are 7.81e-03" in off["kernel"]
    unwritten = bench.check(dataclasses.replace(case, kernel=lambda *inputs: torch.empty_like(inputs[0])), device)
    assert "off by nan" in unwritten["kernel"]


@pytest.mark.usefixtures("interpreter")
def test_a_launch_that_fails_costs_no_other_its_result() -> None:
    """Nor does it hide the others: a compiler's error in an alternative, say."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = next(iter(cases(SMALL[2], 1)))

    def broken(*inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of shared memory")

    wrong = bench.check(dataclasses.replace(case, alternatives={"broken": broken, "same": case.kernel}), device)
    assert wrong == {"broken": "RuntimeError: out of shared memory"}
    results: dict[str, Any] = {"checks": [], "timings": [], "left_out": {}}
    suite.one(dataclasses.replace(case, kernel=broken), None, device, results)
    suite.one(dataclasses.replace(case, make=broken, batch=77), None, device, results)
    assert [check["error"] for check in results["checks"]] == [
        "kernel: RuntimeError: out of shared memory", "RuntimeError: out of shared memory"
    ]  # fmt: skip


@pytest.mark.usefixtures("interpreter")
def test_a_rival_that_fails_costs_the_kernel_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one without memory for it, or an alternative; none of the three is a wrong result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = next(iter(cases(SMALL[2], 1)))

    def raising(error: Exception) -> Any:
        def call(*inputs: torch.Tensor) -> torch.Tensor:
            raise error

        return call

    def seconds(call: Any, sets: list[bench.Inputs]) -> tuple[float, float]:  # that of a graph needs a card
        call(*sets[0])
        return 1e-3, 0.0

    monkeypatch.setattr(bench, "_graph_seconds", seconds)
    monkeypatch.setattr(bench, "_num_sets", lambda *_: (1, True))
    full, cublas = torch.OutOfMemoryError("out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
    rivals = {"large": raising(full), "cuBLAS": raising(cublas), "same": case.kernel}
    alternatives = {"larger": raising(full), "same launch": case.kernel}
    case = dataclasses.replace(case, rivals=rivals, alternatives=alternatives)
    results: dict[str, Any] = {"checks": [], "timings": [], "left_out": {}}
    assert suite.one(case, bench.Ceilings(1e12, 1e12), device, results) == "1000.0 us"
    assert results["checks"] == [{"name": case.name, "error": None}]
    assert results["timings"][0]["rivals_s"] == {"same": 1e-3}
    assert results["timings"][0]["alternatives_s"] == {"same launch": 1e-3}
    assert results["left_out"] == {
        f"{case.name}, larger": "does not fit into this card's memory",
        f"{case.name}, large": "does not fit into this card's memory",
        f"{case.name}, cuBLAS": "not timed: RuntimeError: CUBLAS_STATUS_ALLOC_FAILED",
    }


def test_a_wrong_result_fails_the_run(tmp_path: Path) -> None:
    """In a copy of the package whose kernel is wrong, as a broken commit would be."""
    copy = tmp_path / "copy"
    (copy / "jobs").mkdir(parents=True)
    (copy / "jobs" / "gpu_suite.py").write_text(SUITE.read_text())
    (copy / "kernels").mkdir()
    (copy / "rayspec" / "commands").mkdir(parents=True)
    (copy / "sglang_ext").mkdir()
    for file in (
        *("rayspec/__init__.py", "rayspec/commands/__init__.py", "rayspec/commands/gpu_suite.py"),
        *("sglang_ext/__init__.py", "sglang_ext/whole.py"),
    ):
        (copy / file).write_text((SUITE.parents[1] / file).read_text())
    subprocess.run(["cp", "-r", SUITE.parents[1] / "kernels" / "rayspec_kernels", copy / "kernels"], check=True)
    kernel = copy / "kernels" / "rayspec_kernels" / "grouped_rmsnorm" / "kernel.py"
    assert "/ D + eps)" in kernel.read_text()
    kernel.write_text(kernel.read_text().replace("/ D + eps)", "/ (D + 1) + eps)"))
    environment = {**os.environ, "PYTHONPATH": ""}
    command = [sys.executable, copy / "jobs" / "gpu_suite.py", "--interpret", "--ops", "grouped_rmsnorm", "--out", copy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong" in (copy / "report.md").read_text()


def _hear_ctrl_c() -> None:
    """A process that a shell started in the background ignores it, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_was_measured_before_it_was_cut_off_stays(tmp_path: Path) -> None:
    command = [sys.executable, SUITE, "--interpret", "--ops", "head_topk", "--out", tmp_path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_ctrl_c
    ) as run:
        assert run.stdout is not None
        assert next(line for line in run.stdout if line.startswith("[3/"))  # two were saved
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert f"cut off; what was measured until then is in {tmp_path}" in said
    assert "Traceback" not in said
    assert len(json.loads((tmp_path / "results.json").read_text())["checks"]) >= 2


def timing(op: str, batch: int, seconds: float, **rivals_s: float) -> dict[str, Any]:
    return {"op": op, "shape": "Llama", "batch": batch, "variant": "bf16", "bytes": 1, "flops": 1, "seconds": seconds,
            "spread": 0.01, "floor_s": seconds / 2, "is_cold": batch > 1, "rivals_s": rivals_s,
            "alternatives_s": {}}  # fmt: skip


def test_report_of_timings(tmp_path: Path) -> None:
    timings = [
        timing("head_topk", 1, 1e-4, **{"product alone": 0.9e-4, "product, top-k, log-sum-exp": 3e-4}),
        timing("gather_dot", 64, 2e-4),
        timing("gather_dot", 1, 2e-5),
    ]
    timings[0]["alternatives_s"] = {"split in 4": 1.1e-4}
    assert speedup(timings[0]) == pytest.approx(3.0)  # against what gives the same, not against a part of it
    results = {"provenance": {"GPU": "some"}, "ceilings": {"copy_bytes_per_s": 4e12, "gemm_flops_per_s": 7e14},
               "checks": [{"name": "a", "error": None}], "timings": timings, "left_out": {"b": "no time"},
               "case_s": {"a": 2.5, "c": 0.5, "d": 4.0, "e": 0.25}, "compiled_ahead_s": 90.4}  # fmt: skip
    text = report_text(results, tmp_path)
    assert "| head_topk | bf16 | Llama | 1 | 100.0 warm | 1% | 50.0 | 50% |" in text
    assert "3.00x | split in 4 110.0 |" in text
    assert text.index("| gather_dot | bf16 | Llama | 1 |") < text.index("| gather_dot | bf16 | Llama | 64 |")
    assert "- b: no time" in text
    assert "4 cases took 7 s, after 90 s of compiling ahead; the slowest: d 4.0 s, a 2.5 s, c 0.5 s." in text
    assert (tmp_path / "share_of_floor.png").exists()


def test_every_launch_of_every_case_is_compiled_ahead() -> None:
    """Whatever one of them raises."""
    launched: list[str] = []

    def launch(name: str, fails: bool = False) -> Any:
        def call(x: int) -> None:
            launched.append(f"{name}{x}")
            if fails:
                raise RuntimeError(name)

        return call

    def case(shape: str, make: Any, kernel: Any, **others: Any) -> bench.Case:
        none: Any = None
        return bench.Case(op="an operation", shape=shape, batch=1, variant="", bytes=1, flops=1, make=make,
                          kernel=kernel, check=none, alternatives=others)  # fmt: skip

    too_large = case("too large", lambda _: 1 / 0, launch("never"))
    one = case("one", lambda _: (1,), launch("kernel", fails=True), other=launch("other"))
    two = case("two", lambda _: (2,), launch("kernel"))
    failed = ahead.launch_all([too_large, one, two], torch.device("cpu"))
    assert launched == ["kernel1", "other1", "kernel2"]
    assert failed == 2


def test_what_is_timed_is_what_was_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of it, whatever the number of processes."""
    ops, timed, compiled = ["grouped_rmsnorm", "slim_posterior"], list[str](), list[str]()

    def compile_ahead(ops: list[str]) -> float:
        compiled.extend(case.name for share in range(3) for case in ahead.share_of(ops, share, 3))
        return 1.0

    def one(case: bench.Case, *_: Any) -> str:
        timed.append(case.name)
        return "right"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "ceilings", lambda device: bench.Ceilings(copy_bytes_per_s=1e12, gemm_flops_per_s=1e14))
    monkeypatch.setattr(bench, "is_lost", lambda device: False)
    monkeypatch.setattr(ahead, "compile_ahead", compile_ahead)
    monkeypatch.setattr(suite, "one", one)
    results = suite.run(ops, False, {}, lambda results: None)
    assert sorted(timed) == sorted(compiled) == sorted(results["case_s"])
    models = [case for case in ahead.all_cases(ops) if case.shape in {shape.name for shape in MODELS}]
    assert {(case.op, case.batch) for case in models} == {(op, batch) for op in ops for batch in (1, 4, 16, 64)}


def test_what_compiles_for_too_long_is_ended(tmp_path: Path) -> None:
    """And what dies is not waited for."""
    stays = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    dies, ends, stays_up = ([sys.executable, "-S", "-c", s] for s in ("import os; os.abort()", "print()", stays))
    assert ahead.run_side_by_side([dies, ends], 600) == 1
    assert ahead.run_side_by_side([ends, stays_up], 5) == 1
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, for which much would be compiled")
def test_a_share_of_the_cases_is_a_process_of_its_own() -> None:
    """Without a card it says by its status that inputs cannot be made; with no case there is nothing to fail."""

    def status(share: str, shares: str) -> int:
        command = [sys.executable, "-m", ahead.__name__, share, shares, "grouped_rmsnorm"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode

    assert status("0", "40") == 1
    assert status("9999", "9999") == 0
