"""An engine on CUDA needs a compiler."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.jit.utils.compile import toolchain

from sglang_ext.adapter import engine
from sglang_ext.adapter.toolkit import check_before_speculating, check_toolkit


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CUDA_HOME without nvcc, beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(toolchain, "cuda_home", toolchain.cuda_home.__wrapped__)  # which keeps its first answer
    return tmp_path


def test_an_engine_does_not_start_on_cuda_without_nvcc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.entrypoints.engine.Engine", lambda **_: SimpleNamespace())
    with pytest.raises(RuntimeError, match=rf"there is no {home}/bin/nvcc; install the CUDA toolkit"):
        engine.start_engine("target", None)
    (home / "bin").mkdir()
    (home / "bin" / "nvcc").touch(mode=0o755)
    engine.start_engine("target", None)


def test_nor_does_a_server_that_speculates(home: Path) -> None:
    """SGLang's own command, which rayspec serve runs: while it reads its arguments."""
    with pytest.raises(RuntimeError, match=rf"there is no {home}/bin/nvcc; install the CUDA toolkit"):
        check_before_speculating(lambda _: pytest.fail("went on"), SimpleNamespace(speculative_algorithm="EAGLE3"))


def test_a_server_that_drafts_nothing_is_not_asked(home: Path) -> None:
    assert check_before_speculating(lambda _: "went on", SimpleNamespace(speculative_algorithm=None)) == "went on"


@pytest.mark.parametrize("other", ["no GPU", "SGLang's CPU engine", "ROCm"])
def test_nothing_else_needs_it(other: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if other == "no GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif other == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    else:
        monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    check_toolkit()
