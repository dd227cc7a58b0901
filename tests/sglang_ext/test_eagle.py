"""The EAGLE drafter's checkpoint, its stock form, what it costs, and which algorithm serves it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import SPECS, H, V, make_head
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rayspec.costs import drafter_cost
from rayspec.export import ExportConfig, prepare, write
from sglang_ext.adapter.algorithms import algorithm_of, swap_group
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.counting import StepShape
from sglang_ext.drafters.eagle import EagleConfig, EagleDrafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import WEIGHTS

# no size is another's
CONFIG = EagleConfig(
    hidden_size=H,
    target_hidden_size=H,
    intermediate_size=28,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    vocab_size=V,
    max_position_embeddings=32,
)
TARGET = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=())
BODY = {
    *("fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"),
    *(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def make_drafter(head: str = "full") -> EagleDrafter:
    drafter = EagleDrafter(CONFIG, make_head(SPECS[head]))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in drafter.named_parameters():
        if not name.startswith("lm_head."):
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter.float()


@pytest.mark.parametrize("head", SPECS)
def test_round_trip(tmp_path: Path, head: str) -> None:
    drafter = make_drafter(head)
    save_drafter(tmp_path / "d", drafter, TARGET, {"recipe": "none"})
    loaded, info = load_drafter(tmp_path / "d")
    check_files(info)
    assert (info.kind, info.body, info.target, info.tree) == ("eagle", CONFIG, TARGET, None)
    assert type(loaded) is EagleDrafter
    for name, tensor in drafter.state_dict().items():
        wanted = tensor.bfloat16().float() if tensor.is_floating_point() and tensor.itemsize > 1 else tensor
        torch.testing.assert_close(loaded.state_dict()[name].to(wanted.dtype), wanted, rtol=0, atol=0)
    assert {name for name in load_file(tmp_path / "d" / WEIGHTS) if not name.startswith("lm_head.")} == BODY


def test_sglang_s_own_algorithm_serves_it(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", make_drafter(), TARGET)
    assert algorithm_of(tmp_path / "d", 1) == algorithm_of(tmp_path / "d", 4) == "EAGLE"
    assert swap_group("EAGLE") != swap_group("EAGLE3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": False}, "bias must be true, as SGLang computes fc, got False"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1 for a drafter of kind eagle, got 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, r"must name no layers .* got \[\] and \[2\]"),
        ({"hidden_size": H + 8}, r"hidden_size \(\d+\) must equal the target's"),
        ({"intermediate_size": None}, "intermediate_size"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_drafter(tmp_path, make_drafter(), TARGET)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_info(tmp_path)


def test_its_stock_form_is_its_body(tmp_path: Path) -> None:
    drafter = make_drafter()
    save_drafter(tmp_path / "ours", drafter, TARGET, {"freeze_head": True})
    config = ExportConfig(drafters=[str(tmp_path / "ours")], output_dir=str(tmp_path / "stock"))
    (export,) = prepare(config)
    assert f"{V} rows of {V}" in export.describe()
    write(export)
    assert prepare(config)[0].is_done
    stored = json.loads((export.folder / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForCausalLMEagle"]
    assert not {"draft_head", "rayspec", "draft_vocab_size"} & set(stored)
    tensors = load_file(export.folder / WEIGHTS)
    assert set(tensors) == BODY
    assert all(torch.equal(t, drafter.state_dict()[name].bfloat16()) for name, t in tensors.items())
    assert algorithm_of(export.folder, 1) == algorithm_of(export.folder, 4) == "EAGLE"


@pytest.mark.parametrize(("head", "freeze_head"), [("full", False), ("truncated", True), ("slimspec", False)])
def test_a_head_of_its_own_has_no_stock_form(head: str, freeze_head: bool, tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", make_drafter(head), TARGET, {"freeze_head": True} if freeze_head else {})
    with pytest.raises(ValueError, match="gives a stock EAGLE drafter the target's LM head, and this one has its own"):
        prepare(ExportConfig(drafters=[str(tmp_path / "d")], output_dir=str(tmp_path / "stock")))


@pytest.mark.parametrize("rows", [1, 5])
def test_flops_are_those_that_pytorch_counts(rows: int, tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", make_drafter(), TARGET)
    cost, (drafter, _) = drafter_cost(str(tmp_path / "d")), load_drafter(tmp_path / "d")
    states = torch.randn(1, rows, H)
    # the fused kernel of a CPU is not in the counter's list
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        drafter.step(states, drafter.fuse(states), torch.arange(rows)[None], [])
        drafter.lm_head.best(states[0, -1:], 0)
    assert counter.get_total_flops() == cost.drafting(StepShape(draft_steps=1, num_draft_tokens=rows), keys=rows)
    assert cost.params == sum(p.numel() for p in drafter.parameters())


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="head_dim must be even"):
        replace(CONFIG, head_dim=9)
