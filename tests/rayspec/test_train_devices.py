"""Training on another device than the CPU, where there is none: on tensors without values, which know their device.

Of PyTorch's fake tensors, those of CUDA refuse what CUDA would, but go neither backward nor through a choice of kernels
without a GPU; those of `meta` go through everything. Both refuse products and sums of two devices.
"""

import copy
from typing import Any

import pytest
import torch
from answer_rows import random_rows
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError, FakeTensorMode

from rayspec.training.acceptance import _rollout
from rayspec.training.csra import csra_gradient
from rayspec.training.drafter import training_steps
from rayspec.training.drafter_config import DrafterEntry
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import Origin, new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.ttt import backward_batch, roll_out
from rayspec_kernels.common.dispatch import uses_kernel
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.base import Drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import parse_head

RECIPE = Recipe(num_steps=6, warmup_steps=2, ttt_steps=2, bfloat16=False, chunk_rows=16)
ARTIFACTS = {"ids": torch.arange(0, 257, 2), "cluster_of": torch.arange(257) % 9}
FULL = {"kind": "full"}
ENTRIES = {
    "full": DrafterEntry(name="full", draft_head=parse_head(FULL)),
    "slimspec": DrafterEntry(name="slim", draft_head=parse_head({"kind": "slimspec", "rank": 8})),
    "truncated": DrafterEntry(name="truncated", draft_head=parse_head({"kind": "truncated", "size": 129})),
    "specvocab": DrafterEntry(name="specvocab", draft_head=parse_head({"kind": "specvocab", "rank": 4, "size": 20})),
    "coral": DrafterEntry(name="coral", draft_head=parse_head({"kind": "coral", "clusters": 8, "top": 3})),
    "dynaspec": DrafterEntry(
        name="dynaspec",
        draft_head=parse_head({"kind": "dynaspec", "clusters": 8, "first": 3, "later": 1, "router_width": 12}),
    ),
    "rdk": DrafterEntry(name="rdk", draft_head=parse_head({"kind": "rdk", "base": {"kind": "truncated", "size": 129}})),
    "medusa": DrafterEntry(
        name="medusa", draft_head=parse_head(FULL), drafter=parse_drafter({"kind": "medusa", "positions": 3})
    ),
    "hydra": DrafterEntry(
        name="hydra", draft_head=parse_head(FULL), drafter=parse_drafter({"kind": "hydra", "positions": 3})
    ),
    "hydra_prefix": DrafterEntry(
        name="hydra",
        draft_head=parse_head(FULL),
        drafter=parse_drafter({"kind": "hydra", "positions": 3, "prefix_layer": True, "mlp_layers": 2}),
    ),
    "specformer": DrafterEntry(
        name="specformer", draft_head=parse_head(FULL), drafter=parse_drafter({"kind": "specformer", "positions": 3})
    ),
    "independent": DrafterEntry(
        name="independent",
        draft_head=parse_head(FULL),
        drafter=parse_drafter({"kind": "independent", "hidden_size": 16, "num_layers": 1}),
    ),
}
# those that others hold: hydra with a prefix layer is hydra too, and rdk has a truncated base
HELD = {"hydra", "truncated"}
ASKED = [pytest.param(e, id=n, marks=[pytest.mark.slow] if n in HELD else []) for n, e in ENTRIES.items()]


def without_values(module: Any, device: str) -> Any:
    """Its copy in the mode that is active."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device=device)
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device)
    return module


def on_device(target: FrozenTarget, entry: DrafterEntry, device: str) -> tuple[Drafter, FrozenTarget, Batch, Any]:
    """(drafter, target, batch, mode), none with values."""
    answers = random_rows()
    drafter = new_drafter(target, entry, RECIPE, answers, Origin(ARTIFACTS))
    model, batch = copy.deepcopy(target.model), Batch.of(answers, torch.tensor([0, 4]))
    with torch.no_grad():  # what is computed once and kept, such as the angles of positions, must have its values
        roll_out(drafter, target, batch, training_steps(drafter, RECIPE))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        moved = FrozenTarget("", "", without_values(model, device), target.tokenizer)
        rows = [torch.empty_like(t, device=device) for t in (batch.ids_BT, batch.sequence_N, batch.position_N)]
        return without_values(drafter, device), moved, Batch(*rows), mode


@pytest.mark.parametrize("entry", ASKED)
def test_a_rollout_and_its_acceptance_stay_on_cuda(
    tiny_target: FrozenTarget, entry: DrafterEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if under autocast, where nothing asks the GPU whether it has kernels."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: True)
    drafter, target, batch, mode = on_device(tiny_target, entry, "cuda")
    assert target.device.type == "cuda"
    with mode, torch.no_grad():
        steps = training_steps(drafter, RECIPE)
        rows = roll_out(drafter, target, batch, steps)
        assert {t.device.type for t in rows if t is not None} == {"cuda"}
        assert [t.device.type for t in _rollout(drafter, target, batch, steps, chunk_rows=5)] == ["cpu", "cpu"]
        with pytest.raises((FakeTensorDeviceMismatchError, RuntimeError), match="same device"):
            roll_out(drafter, target, Batch(batch.ids_BT.cpu(), batch.sequence_N, batch.position_N), 1)


def test_kernels_leave_autocast_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training measures under it, with states in bfloat16 and a head in float32, of which a kernel takes one alone."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode(), torch.no_grad():
        rows = torch.empty(3, 8, device="cuda", dtype=torch.bfloat16)
        assert uses_kernel(rows)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        assert not uses_kernel(rows)


@pytest.mark.parametrize("entry", ASKED)
def test_gradients_and_acceptance_are_computed_where_the_target_is(
    tiny_target: FrozenTarget, entry: DrafterEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # which `meta` knows nothing of
    drafter, target, batch, mode = on_device(tiny_target, entry, "meta")
    with mode:
        steps = training_steps(drafter, RECIPE)
        loss = backward_batch(drafter, target, batch, num_steps=steps, decay=0.8, chunk_rows=5)
        assert loss.head_K.device.type == "meta"
        trained = [p.grad for p in drafter.parameters() if p.grad is not None]
        assert trained
        assert {grad.device.type for grad in trained} == {"meta"}
        with torch.no_grad():
            found = _rollout(drafter, target, batch, steps, chunk_rows=5)
        assert [t.device.type for t in found] == ["cpu", "cpu"]


def test_the_contrastive_loss_is_computed_where_the_states_are() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        grad_KNH, loss = csra_gradient(torch.empty(3, 7, 8, device="meta"), temperature=0.1, chunk_rows=4)
    assert {grad_KNH.device.type, loss.device.type} == {"meta"}
