"""An engine that cannot start says why and leaves nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fixture_models import DRAFTERS, TARGET

from rayspec.farm.actor import RuntimeHandle, cluster
from rayspec.farm.processes import environment, peak_memory_bytes, redirected_output, reset_peak_memory
from rayspec.farm.runtime import EngineFailed, EngineSpec, Runtime
from sglang_ext import COUNT_SHORTLISTS
from sglang_ext.adapter import engine


@pytest.mark.slow  # of a whole sweep: test_broken_trials_fail_alone_with_their_cause
def test_a_failing_start_carries_the_cause_and_leaves_no_process(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTERS["full"], drafter)
    (drafter / "model.safetensors").unlink()
    spec = EngineSpec(target=str(TARGET), drafter=str(drafter), draft_steps=2, overrides={"max_total_tokens": 4096})
    before = children()
    with cluster(None):
        handle = RuntimeHandle(spec, tmp_path / "engine.log", num_cpus=1, num_gpus=0, block_timeout_s=60)
        with pytest.raises(
            EngineFailed, match=r"drafter did not start: RuntimeError: Cannot find any model weights"
        ) as caught:
            handle.finish_start(handle.begin_start(), timeout_s=900)
        handle.stop()
    assert f"--- end of {tmp_path}/engine.log ---" in str(caught.value)
    assert children() <= before


def test_an_engine_is_asked_to_count_what_heads_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it captures, and nothing else is that this process starts."""

    def start(*arguments: object, **options: object) -> None:
        raise ValueError(f"it is {os.environ.get(COUNT_SHORTLISTS)}")

    monkeypatch.setattr(engine, "start_engine", start)
    with pytest.raises(EngineFailed, match="it is 1"):
        Runtime(EngineSpec(target="anything"), tmp_path / "engine.log").start()
    assert COUNT_SHORTLISTS not in os.environ


def children() -> set[int]:
    """Python's own tracker of semaphores, which it starts again at will, is nothing that an engine leaves."""
    found = psutil.Process().children(recursive=True)
    return {p.pid for p in found if "multiprocessing.resource_tracker" not in " ".join(p.cmdline())}


def test_output_of_children_goes_to_the_log_and_comes_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with redirected_output(tmp_path / "log"):
        os.system("echo from a child")
    os.system("echo afterwards")
    assert (tmp_path / "log").read_text() == "from a child\n"
    assert capfd.readouterr().out == "afterwards\n"


def test_environment_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYSPEC_A", "old")
    monkeypatch.delenv("RAYSPEC_B", raising=False)
    with environment({"RAYSPEC_A": "new", "RAYSPEC_B": "new"}):
        assert (os.environ["RAYSPEC_A"], os.environ["RAYSPEC_B"]) == ("new", "new")
    assert os.environ["RAYSPEC_A"] == "old"
    assert "RAYSPEC_B" not in os.environ


def test_peak_memory_is_that_since_the_reset() -> None:
    """A child takes 300 MiB and gives them back; after a reset it holds little."""
    code = "import mmap; m = mmap.mmap(-1, 300 << 20); m.write(bytes(300 << 20)); m.close(); print(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        processes = [psutil.Process(child.pid)]
        peak = peak_memory_bytes(processes)
        assert peak is not None
        assert peak > 300 << 20
        reset_peak_memory(processes)
        after = peak_memory_bytes(processes)
        child.communicate(b"\n")
    assert after is not None
    assert after < 100 << 20
    assert peak_memory_bytes(processes) is None
