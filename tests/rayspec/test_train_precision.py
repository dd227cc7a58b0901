from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayspec.training.data.answer_engines import _dtype
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, WorkersConfig
from rayspec.training.drafter_runs import _precision, _recipe_beside
from rayspec.training.precision import BFLOAT16_INSTRUCTIONS, Float32Muon, has_bfloat16
from rayspec.training.recipe import Recipe
from rayspec.training.train_state import Progress, load_state, save_state
from sglang_ext.heads import parse_head

CPU = torch.device("cpu")
FULL = DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))


def updated(kind: type[torch.optim.Muon], shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    optimizer = kind([weight], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn(shape, generator=generator)
        optimizer.step()
    return weight.detach()


def exactly(shape: tuple[int, int]) -> Tensor:
    """The same updates in float64, by the singular values that the iterations move."""
    generator = torch.Generator().manual_seed(0)
    momentum, weight = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    a, b, c = 3.4445, -4.775, 2.0315
    for _ in range(3):
        grad = torch.randn(shape, generator=generator).double()
        momentum = 0.95 * momentum + 0.05 * grad
        u, s, vh = torch.linalg.svd(0.05 * grad + 0.95 * momentum, full_matrices=False)
        s = s / s.square().sum().sqrt()
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        weight -= max(1.0, shape[0] / shape[1]) ** 0.5 * (u * s) @ vh
    return weight


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_muon_in_float32_is_muon(shape: tuple[int, int]) -> None:
    wanted = exactly(shape)
    torch.testing.assert_close(updated(Float32Muon, shape).double(), wanted, rtol=0, atol=1e-4)
    theirs = updated(torch.optim.Muon, shape).double()  # afterwards: what was put in PyTorch's place is out again
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=0.1)
    assert (theirs - wanted).abs().max() > 1e-3


def capabilities(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any]) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", **found})


def test_a_processor_has_bfloat16_by_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.cpu.get_capabilities()
    flags = Path("/proc/cpuinfo").read_text().split()
    assert has_bfloat16(CPU) == bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))
    assert real["architecture"] != "x86_64" or {"avx512_bf16", "amx_bf16"} <= set(real)  # as PyTorch names them
    for name in BFLOAT16_INSTRUCTIONS:
        capabilities(monkeypatch, {name: True})
        assert has_bfloat16(CPU)
    capabilities(monkeypatch, dict.fromkeys(BFLOAT16_INSTRUCTIONS, False) | {"avx2": True})
    assert not has_bfloat16(CPU)
    assert has_bfloat16(torch.device("cuda"))


@pytest.mark.parametrize("can", [False, True])
def test_precision_that_is_left_open_is_the_machines(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities(monkeypatch, {"avx512_bf16": can})
    fast = torch.bfloat16 if can else torch.float32
    config = DrafterTrainConfig(drafters=[FULL], device="cpu")
    assert config.target_dtype == fast
    assert config.resolved().recipe.bfloat16 == can
    assert _dtype(num_gpus=0) == ("bfloat16" if can else "float32")
    assert _dtype(num_gpus=0.5) == "bfloat16"
    for count, dtype in ((0, fast), (1, torch.bfloat16)):
        workers = replace(config, device="auto", workers=WorkersConfig(num_gpus=count))
        assert workers.target_dtype == dtype
    for asked in (False, True):
        explicit = replace(config, recipe=Recipe(bfloat16=asked))
        assert explicit.resolved().recipe.bfloat16 == asked
        assert ("slow" in _precision(explicit)) == (asked and not can)
    assert ("since this processor" in _precision(config)) == (not can)
    body = torch.nn.ModuleDict({"fc": torch.nn.Linear(3, 3)})
    (_, muon) = Recipe().make_optimizers(body)  # type: ignore[arg-type]  # any module with a matrix
    assert isinstance(muon, Float32Muon) != can


def test_a_drafter_of_either_precision_is_the_recipes_unless_it_names_one() -> None:
    open_, explicit = (DrafterTrainConfig(drafters=[FULL], recipe=Recipe(bfloat16=x)) for x in (None, False))
    for stored in (True, False):
        recipe = Recipe(bfloat16=stored).to_dict()
        assert _recipe_beside(open_, recipe) == recipe
        assert (_recipe_beside(explicit, recipe) == recipe) == (stored is False)
    assert _recipe_beside(open_, Recipe(bfloat16=True, lr=0.5).to_dict()) != Recipe(bfloat16=True, lr=0.5).to_dict()


def test_an_unfinished_training_in_the_other_precision_is_refused_with_the_value_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun on an old processor, to go on where there are instructions: a recipe that leaves it open means another."""
    config, model = DrafterTrainConfig(drafters=[FULL], device="cpu"), torch.nn.Linear(2, 2)

    def fingerprint(can: bool) -> dict[str, Any]:
        capabilities(monkeypatch, {"avx512_bf16": can})
        return {"recipe": config.resolved().recipe.to_dict()}

    save_state(tmp_path, Progress(fingerprint=fingerprint(False)), model, [])
    with pytest.raises(ValueError, match=r"with recipe\.bfloat16=False, now it is True; set it back"):
        load_state(tmp_path, fingerprint(True), model, [])
    assert load_state(tmp_path, fingerprint(False), model, []) is not None
