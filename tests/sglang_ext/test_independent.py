"""The independent drafter as a module, its checkpoint, and which algorithm serves it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import SPECS, V, make_head
from independent_cases import as_hugging_face
from safetensors.torch import load_file, save_file

from sglang_ext.adapter.algorithms import algorithm_of, swap_group
from sglang_ext.adapter.engine import engine_arguments
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.independent import IndependentConfig, IndependentDrafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import WEIGHTS

# no size is another's
CONFIG = IndependentConfig(
    vocab_size=V,
    max_position_embeddings=32,
    hidden_size=24,
    num_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    intermediate_size=28,
    rope_theta=500.0,
)
TARGET = TargetInfo(name="toy", hidden_size=77, vocab_size=V, tokenizer_sha256="abc", tap_layers=())


def make_drafter(head: str = "full", config: IndependentConfig = CONFIG) -> IndependentDrafter:
    """Every weight random and large, so that nothing under test can hide behind a small one."""
    drafter = IndependentDrafter(config, make_head(SPECS[head]))
    generator = torch.Generator().manual_seed(5)
    for parameter in drafter.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter.float()


def some_ids(B: int, T: int) -> torch.Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
@pytest.mark.parametrize("T", [1, 2, 13])
def test_it_is_hugging_face_s_llama(T: int) -> None:
    drafter, ids_BT = make_drafter(), some_ids(3, T)
    logits = drafter.lm_head.target_logits(drafter(ids_BT).flatten(0, 1)).view(3, T, V)
    torch.testing.assert_close(logits, as_hugging_face(drafter)(ids_BT).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_slot_reads_its_own_token_and_those_before_it() -> None:
    drafter, ids_BT = make_drafter(), some_ids(1, 9)
    before = drafter(ids_BT)
    changed = ids_BT.clone()
    changed[0, 4] = (ids_BT[0, 4] + 1) % V
    moved_T = (drafter(changed) - before).abs().amax(dim=-1)[0] > 1e-6
    assert moved_T.tolist() == [False] * 4 + [True] * 5


@torch.no_grad()
def test_a_text_may_start_at_any_position() -> None:
    """SGLang shows it a text without its first token, at positions from 0 on."""
    drafter, ids_BT = make_drafter(), some_ids(2, 6)
    model = as_hugging_face(drafter)
    later = model(ids_BT, position_ids=torch.arange(5, 11)[None].expand(2, -1)).logits
    ours = drafter.lm_head.target_logits(drafter(ids_BT).flatten(0, 1)).view(2, 6, V)
    torch.testing.assert_close(ours, later, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head", ["full", "truncated", "truncated_by_step", "dynaspec", "rdk_truncated"])
def test_round_trip(tmp_path: Path, head: str) -> None:
    drafter = make_drafter(head)
    save_drafter(tmp_path / "d", drafter, TARGET, {"recipe": "none"})
    loaded, info = load_drafter(tmp_path / "d")
    check_files(info)
    assert (info.kind, info.body, info.target, info.tree) == ("independent", CONFIG, TARGET, None)
    assert info.provenance == {"recipe": "none"}
    assert type(loaded) is IndependentDrafter
    for name, tensor in drafter.state_dict().items():
        wanted = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        torch.testing.assert_close(loaded.state_dict()[name], wanted, rtol=0, atol=0)
    names = set(load_file(tmp_path / "d" / WEIGHTS))
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"} <= names


def test_the_defaults_stay_near_a_million_parameters_on_the_demo_target() -> None:
    """16,384 rows of embedding, and 4,096 of a truncated head."""
    body = IndependentDrafter(IndependentConfig(vocab_size=16384), torch.nn.Identity())  # type: ignore[arg-type]
    params = sum(p.numel() for p in body.parameters())
    assert 1.3e6 < params + 4096 * 64 < 1.5e6


def edit_config(folder: Path, change: Callable[[dict], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


CONFIG_FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "missing": (lambda c: c.pop("num_hidden_layers"), "d: config.json has no 'num_hidden_layers'"),
    "missing_theta": (lambda c: c.pop("rope_parameters"), "config.json has no 'rope_theta'"),
    "type": (lambda c: c.update(head_dim="10"), "head_dim must be a whole number, got '10'"),
    "size": (lambda c: c.update(num_key_value_heads=0), r"drafter.num_key_value_heads must be in 1\.\.\d+, got 0"),
    "groups": (lambda c: c.update(num_key_value_heads=3), r"\(4\) must be a multiple of .*num_key_value_heads \(3\)"),
    "odd": (lambda c: c.update(head_dim=9), r"head_dim must be even \(rotary halves\), got 9"),
    "rope": (lambda c: c["rope_parameters"].update(rope_type="linear", factor=2.0), "rope_type must be 'default'"),
    "bias": (lambda c: c.update(attention_bias=True), "attention_bias must be False for an independent drafter"),
    "tied": (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "taps": (lambda c: c["rayspec"]["target"].update(tap_layers=[2]), r"tap_layers must be empty .* got \[2\]"),
    "vocabulary": (lambda c: c.update(vocab_size=99), "vocab_size is 99, but rayspec.target.vocab_size is 53"),
    "tree": (
        lambda c: c.update(draft_tree={"kind": "static", "paths": [[0]]}),
        "kind independent, which builds its tree as it drafts",
    ),
    "head": (lambda c: c["draft_head"].update(kind="ful"), r"draft_head.kind must be one of full, .*, got 'ful'"),
    "head_option": (lambda c: c["draft_head"].update(rank=3), "unknown key 'draft_head.rank'"),
    "layers": (lambda c: c.update(num_hidden_layers=2), r"unknown model\.layers\.2\.self_attn\.q_proj\.weight"),
    "width": (lambda c: c.update(hidden_size=32), r"model\.embed_tokens\.weight has shape \[53, 24\], expected"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_must_fit(tmp_path: Path, fault: str) -> None:
    save_drafter(tmp_path / "d", make_drafter(), TARGET)
    change, message = CONFIG_FAULTS[fault]
    edit_config(tmp_path / "d", change)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


TENSOR_FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), r"missing model\.norm\.weight \[24\]"),
    "unknown": (lambda t: t.update(extra=torch.ones(2)), r"unknown extra \[2\]"),
    "shape": (lambda t: t.update({"lm_head.weight": torch.ones(V, 4)}), r"lm_head\.weight has shape \[53, 4\]"),
    # which an EAGLE-3 layer may be called
    "midlayer": (
        lambda t: t.update({"midlayer.mlp.up_proj.weight": t.pop("model.layers.0.mlp.up_proj.weight")}),
        r"missing model\.layers\.0\.mlp\.up_proj\.weight",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_must_fit(tmp_path: Path, fault: str) -> None:
    save_drafter(tmp_path / "d", make_drafter(), TARGET)
    tensors = load_file(tmp_path / "d" / WEIGHTS)
    change, message = TENSOR_FAULTS[fault]
    change(tensors)
    save_file(tensors, tmp_path / "d" / WEIGHTS)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_options() -> None:
    sizes = {"vocab_size": V, "max_position_embeddings": 32}
    assert IndependentConfig.from_options(CONFIG.options, sizes) == CONFIG
    with pytest.raises(ValueError, match=r"unknown key 'drafter\.layers'; known under drafter: hidden_size, num_"):
        parse_drafter({"kind": "independent", "layers": 2})
    with pytest.raises(ValueError, match=r"drafter.num_layers must be a whole number, got '2'"):
        parse_drafter({"kind": "independent", "num_layers": "2"})
    with pytest.raises(ValueError, match=r"drafter.hidden_size must be in 1\.\.\d+, got -1"):
        replace(CONFIG, hidden_size=-1)


def test_standalone_serves_it_and_ordinary_language_models(tmp_path: Path) -> None:
    drafter = make_drafter()
    save_drafter(tmp_path / "ours", drafter, TARGET)
    as_hugging_face(drafter).save_pretrained(tmp_path / "llama")
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for name in ("ours", "llama", "gpt"):
        assert [algorithm_of(tmp_path / name, topk) for topk in (1, 4)] == ["STANDALONE"] * 2
    assert swap_group("STANDALONE") == "standalone"
    arguments = engine_arguments("target", str(tmp_path / "ours"), draft_steps=3)
    assert arguments["speculative_algorithm"] == "STANDALONE"
    assert arguments["speculative_num_draft_tokens"] == 4
    with pytest.raises(ValueError, match=r"architectures must be one of .*RaySpecIndependent"):
        read_info(tmp_path / "llama")
