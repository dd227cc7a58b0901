"""Checkpoints of an unfinished training run: body, head, optimizers, step, random state. No pickle.

One folder per step, `step-00000100/`, written whole; older ones go once a newer one is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rayspec.identity import differences
from sglang_ext.folders import save_tensors
from sglang_ext.heads import parse_head
from sglang_ext.whole import whole_folder


@dataclass
class Progress:
    """What is not a tensor: steps done, curves, seconds spent, and the run's fingerprint."""

    fingerprint: dict[str, Any]  # what must not change between the parts of one run
    step: int = 0
    seconds: float = 0.0
    mlflow_run_id: str | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def save_state(folder: Path, progress: Progress, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    tensors: dict[str, Tensor] = {f"model/{n}": t.cpu().contiguous() for n, t in model.state_dict().items()}
    for k, optimizer in enumerate(optimizers):
        for index, entries in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer{k}/{index}/{name}": t.cpu().contiguous() for name, t in entries.items()}
    tensors["rng"] = torch.get_rng_state()
    final = folder / f"step-{progress.step:08d}"
    with whole_folder(final) as draft:
        save_tensors(tensors, draft / "state.safetensors")
        (draft / "progress.json").write_text(json.dumps(vars(progress)))
    for old in (*folder.glob("step-*"), *folder.glob(".step-*")):  # drafts are those of a run that was killed
        if old != final:
            shutil.rmtree(old)


def load_state(
    folder: Path, fingerprint: dict[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Progress | None:
    """Restore the newest state in place, on whichever device the model is, or None if there is none. Raises ValueError
    if it is of another run."""
    found = sorted(folder.glob("step-*"))
    if not found:
        return None
    progress = Progress(**json.loads((found[-1] / "progress.json").read_text()))
    before = progress.fingerprint
    if "draft_head" in before:  # earlier releases left out the options that were at their defaults
        before = {**before, "draft_head": parse_head(before["draft_head"]).spec()}
    for key, was, now in differences(before, fingerprint):
        raise ValueError(
            f"the unfinished training in {folder} was started with {key}={was}, now it is {now}; set it back to "
            "continue, or delete that folder to start again"
        )
    tensors = load_file(found[-1] / "state.safetensors")
    model.load_state_dict({n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")})
    for k, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith(f"optimizer{k}/"):
                _, index, name = key.split("/")
                state.setdefault(int(index), {})[name] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng"])
    return progress
