"""What a command on a training config says to what goes wrong in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayspec.training import command


def test_too_little_memory_is_said_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(config: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 384.00 GiB.\nmore")

    def steps() -> tuple[Callable[..., list[str]], Callable[..., Any]]:
        return lambda config: [], make

    monkeypatch.setattr(command, "set_up", lambda: None)
    (tmp_path / "c.yaml").write_text("drafters: [{name: full, draft_head: {kind: full}}]\n")
    assert command.run("train", "Train.", ["--config", str(tmp_path / "c.yaml")], steps) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: CUDA out of memory. Tried to allocate 384.00 GiB.; raise recipe.accumulate, or ")
    assert "workers.count" in said
    assert "more" not in said.splitlines()
