"""Training checkpoints: one safetensors file with weights, optimiser moments and, as metadata, the loop's own state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rayspec.identity import differences
from sglang_ext.folders import save_tensors
from sglang_ext.whole import whole_file

# settings that may change between two starts of one run without changing what is learnt
FREE_SETTINGS = {
    "checkpoint_every_s",
    "compile",  # and num_threads: rounding only
    "decay_fraction",
    "eval_every_s",
    "export_dir",
    "held_out_tokens",
    "mlflow",
    "name",
    "num_threads",
    "token_budget",  # like decay_fraction, checked by the loop: free only while the learning rate is constant
}


def save_checkpoint(
    path: Path,
    config: dict[str, Any],
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
) -> None:
    """A killed run leaves the previous checkpoint whole."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {f"model/{name}": parameter.detach() for parameter, name in names.items()}
    for optimizer in optimizers:
        for parameter, name in names.items():
            moments = optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/{name}/{key}": value for key, value in moments.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as draft:
        save_tensors(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            draft,
            metadata={"state": json.dumps(state), "config": json.dumps(config)},
        )


def load_checkpoint(
    path: Path, config: dict[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any] | None:
    """Restore in place and return the loop's state, or None where there is no checkpoint yet."""
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        saved = json.loads(metadata["config"])
        wanted = json.loads(json.dumps(config))
        changed = differences(saved, wanted, keys=[key for key in wanted if key not in FREE_SETTINGS])
        if changed:
            raise ValueError(
                f"{path} was trained with other settings: "
                + ", ".join(f"{key} was {was!r}, now {now!r}" for key, was, now in changed)
                + "; give the run another name, or delete its folder to start over"
            )
        owners = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        keys = file.keys()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(file.get_tensor(f"model/{name}"))
            prefix = f"optimizer/{name}/"
            moments = {key.removeprefix(prefix): file.get_tensor(key) for key in keys if key.startswith(prefix)}
            if moments and optimizers:  # an export restores weights alone
                owners[parameter].state[parameter] = moments
    return json.loads(metadata["state"])
