"""SpecFormer's module: what each slot depends on, its parts by hand, and its checkpoint."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ext.adapter.algorithms import algorithm_of, checked_info
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.specformer import SpecFormerConfig, SpecFormerDrafter, specformer_taps
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import head_from_target, parse_head

V, H, HEADS, KV, D, SLOTS, LAYERS = 40, 24, 4, 2, 6, 5, 6
CONFIG = SpecFormerConfig(
    hidden_size=H,
    vocab_size=V,
    positions=SLOTS,
    intermediate_size=20,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=D,
    rms_norm_eps=1e-5,
    rope=Rope(),
    tap_layers=specformer_taps(LAYERS),
)
TARGET = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=CONFIG.tap_layers)
FULL = {"kind": "full"}


def make(config: SpecFormerConfig = CONFIG, head: dict[str, Any] = FULL) -> SpecFormerDrafter:
    torch.manual_seed(0)
    drafter = SpecFormerDrafter(config, config.heads(lambda: head_from_target(parse_head(head), torch.randn(V, H))))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return drafter.requires_grad_(False)


def taps(B: int, T: int) -> Tensor:
    return torch.randn(B, T, 4 * H, generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + CONFIG.rms_norm_eps) * weight


def attend(module: Any, rows: list[Tensor], allowed: Callable[[int, int], bool], rotary: bool) -> list[Tensor]:
    """Row by row, head by head."""

    def turned(x: Tensor, place: int) -> Tensor:
        if not rotary:
            return x
        out = x.clone()
        for i in range(D // 2):
            angle = place * CONFIG.rope.rope_theta ** (-i / (D // 2))
            a, b = float(x[i]), float(x[i + D // 2])
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + D // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def heads(projection: Any) -> list[list[Tensor]]:
        return [list((projection.weight @ row).split(D)) for row in rows]

    q, k, v = heads(module.q_proj), heads(module.k_proj), heads(module.v_proj)
    answers = []
    for t in range(len(rows)):
        parts = []
        for a in range(HEADS):
            group = a // (HEADS // KV)
            seen = [s for s in range(len(rows)) if allowed(t, s)]
            scores = torch.stack([turned(q[t][a], t) @ turned(k[s][group], s) / math.sqrt(D) for s in seen])
            parts.append(sum(w * v[s][group] for w, s in zip(scores.softmax(0), seen, strict=True)))
        answers.append(module.o_proj.weight @ torch.cat(parts))
    return answers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("projection", [True, False])
def test_it_computes_the_equations(causal: bool, projection: bool) -> None:
    drafter = make(replace(CONFIG, causal=causal, position_projection=projection))
    x_TG = taps(1, 4)[0]
    I = [  # noqa: E741  (the paper's name)
        drafter.fc.weight
        @ torch.cat([norm(g, w) for g, w in zip(x.split(H), drafter.tap_norm.weight.split(H), strict=True)])
        for x in x_TG
    ]
    before = attend(
        drafter.context_attn, [norm(i, drafter.context_norm.weight) for i in I], lambda t, s: s <= t, rotary=True
    )
    context = [i + a for i, a in zip(I, before, strict=True)]
    torch.testing.assert_close(drafter.context(x_TG[None])[0], torch.stack(context), atol=1e-4, rtol=1e-4)
    x = norm(context[-1], drafter.position_norm.weight)
    slots = list((drafter.position_proj.weight @ x).split(H)) if projection else [x] * SLOTS
    slots = [d + code for d, code in zip(slots, drafter.position_code, strict=True)]
    mixed = attend(
        drafter.slot_attn,
        [norm(d, drafter.slot_norm.weight) for d in slots],
        lambda i, j: j <= i or not causal,
        rotary=False,
    )
    mlp, E = drafter.mlp, [d + a for d, a in zip(slots, mixed, strict=True)]
    for i, e in enumerate(E):
        y = norm(e, drafter.mlp_norm.weight)
        e = e + mlp.down_proj.weight @ (torch.nn.functional.silu(mlp.gate_proj.weight @ y) * (mlp.up_proj.weight @ y))
        found = drafter.begin(context[-1][None], SLOTS)[0, i]
        torch.testing.assert_close(found, norm(e, drafter.norm.weight), atol=1e-4, rtol=1e-4)


def test_later_tokens_never_change_the_slots_of_earlier_ones() -> None:
    drafter, x_BTG = make(), taps(2, 7)
    changed = x_BTG.clone()
    changed[:, 4:] = torch.randn(2, 3, 4 * H)
    one, other = drafter.context(x_BTG), drafter.context(changed)
    torch.testing.assert_close(one[:, :4], other[:, :4])
    assert not torch.allclose(one[:, 4], other[:, 4])


@pytest.mark.parametrize("causal", [False, True])
def test_a_slot_reads_later_slots_only_when_bidirectional(causal: bool) -> None:
    drafter, context_NH = make(replace(CONFIG, causal=causal)), torch.randn(3, H)
    before = drafter.slots(context_NH)
    drafter.position_code[3] += 1.0
    after = drafter.slots(context_NH)
    assert torch.equal(before[:, :3], after[:, :3]) == causal
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("wanted", [1, 3, SLOTS])
def test_fewer_slots_are_the_first_of_all(wanted: int) -> None:
    drafter, context_NH = make(), torch.randn(3, H)
    torch.testing.assert_close(drafter.slots(context_NH, wanted), drafter.slots(context_NH)[:, :wanted])


def test_taps_of_small_and_large_targets() -> None:
    assert specformer_taps(36) == (0, 18, 35, 36)
    with pytest.raises(ValueError, match="at least 3"):
        specformer_taps(2)


@pytest.mark.parametrize("changes", [{}, {"causal": True}, {"position_projection": False}, {"shared_head": False}])
def test_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    drafter = make(replace(CONFIG, **changes), {"kind": "slimspec", "rank": 4})
    save_drafter(tmp_path / "d", drafter, TARGET, {"recipe": "none"})
    check_files(read_info(tmp_path / "d"))
    loaded, info = load_drafter(tmp_path / "d")
    assert (info.kind, info.target, info.body) == ("specformer", TARGET, drafter.config)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())


CONFIG_FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "slots": (lambda c: c["drafter"].update(positions=4), r"position_code has shape \[5, 24\], expected \[4, 24\]"),
    "ablation": (lambda c: c["drafter"].update(position_projection=False), r"unknown position_proj\.weight"),
    "option": (lambda c: c["drafter"].update(bidirectional=True), "unknown key 'drafter.bidirectional'"),
    "type": (lambda c: c["drafter"].update(causal=1), "drafter.causal must be true or false, got 1"),
    "taps": (lambda c: c["rayspec"]["target"].update(tap_layers=[0, 2, 5, 6]), "must be all but the last minus one"),
    "one_tap": (lambda c: c["rayspec"]["target"].update(tap_layers=[6]), "must be at least two layers"),
    "number": (lambda c: c.update(num_aux_hidden_states=3), "num_aux_hidden_states 3"),
    "rope": (lambda c: c["rope_parameters"].update(rope_type="dynamic"), "rope_type must be one of .*, got 'dynamic'"),
    "no_theta": (lambda c: c["rope_parameters"].pop("rope_theta"), "has no 'rope_theta'"),
    "layers": (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers must be 1 for SpecFormer, got 2"),
    "heads": (lambda c: c.pop("num_attention_heads"), "config.json has no 'num_attention_heads'"),
    "other": (lambda c: c.update(architectures=["RaySpecMedusa"]), "tap_layers must be empty"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_must_fit(tmp_path: Path, fault: str) -> None:
    save_drafter(tmp_path / "d", make(), TARGET)
    change, message = CONFIG_FAULTS[fault]
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    change(config)
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_it_is_served_as_a_chain_alone(tmp_path: Path) -> None:
    save_drafter(tmp_path / "d", make(), TARGET)
    assert algorithm_of(tmp_path / "d", 1) == "SPECFORMER"
    with pytest.raises(ValueError, match="a specformer drafter is served as a chain; set topk to 1, got 4"):
        algorithm_of(tmp_path / "d", 4)
    with pytest.raises(ValueError, match="is of kind specformer; use SPECFORMER"):
        checked_info(str(tmp_path / "d"), "MEDUSA")
