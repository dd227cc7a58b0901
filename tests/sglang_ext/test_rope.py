"""Rotary embeddings against SGLang's own module, which shares no code with them."""

import json
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope

from sglang_ext.drafters.eagle3 import Eagle3Config
from sglang_ext.drafters.layers import rotate
from sglang_ext.drafters.rope import ROPE_TYPES, Rope
from sglang_ext.drafters.specformer.config import SpecFormerConfig, SpecFormerOptions

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "default_of_qwen": {"rope_type": "default", "rope_theta": 5e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "llama3": LLAMA3,
    "llama3_of_one_band": {**LLAMA3, "factor": 32.0, "low_freq_factor": 2.0},
    "yarn": YARN,
    "yarn_of_gpt_oss": {**YARN, "rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn_of_deepseek": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
}
CONTEXT = 2048
EAGLE3 = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "tap_layers": (2, 4, 5),
}


def test_every_kind_is_compared() -> None:
    assert {rope["rope_type"] for rope in ROPES.values()} == set(ROPE_TYPES)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128])
def test_equals_sglangs_rotary_module(name: str, head_dim: int) -> None:
    rope = Rope(**ROPES[name])
    positions_T = torch.tensor([0, 1, 2, 63, 511, 512, 513, 1000, CONTEXT - 1])
    generator = torch.Generator().manual_seed(0)
    q_TAD = torch.randn(len(positions_T), 3, head_dim, generator=generator)
    k_TKD = torch.randn(len(positions_T), 1, head_dim, generator=generator)
    module = get_rope(
        head_dim,
        rotary_dim=head_dim,
        max_position=CONTEXT,
        base=rope.rope_theta,  # type: ignore[arg-type]  # as SGLang's own models call it
        rope_scaling=rope.to_json(),
        dtype=torch.float32,
    )
    expected = module.forward_native(positions_T, q_TAD.flatten(1).clone(), k_TKD.flatten(1).clone())
    for ours, theirs in zip((q_TAD, k_TKD), expected, strict=True):
        rotated = rotate(ours[None], positions_T[None], rope)[0]
        # angles of up to 2047 radians, of which float32 keeps four decimals; the frequencies differ in their last bit
        torch.testing.assert_close(rotated.flatten(1), theirs, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ROPES)
def test_survives_a_checkpoint(name: str) -> None:
    rope = Rope(**ROPES[name])
    assert Rope.from_json(json.loads(json.dumps({"rope_parameters": rope.to_json()}))) == rope
    eagle3 = Eagle3Config(**EAGLE3, rope=rope)
    stored = json.loads(json.dumps(eagle3.to_json()))
    assert stored["rope_parameters"] == ROPES[name]
    assert Eagle3Config.from_json(stored, 64, (2, 4, 5)) == eagle3
    sizes = {**EAGLE3, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope": rope.to_json()}
    specformer = SpecFormerConfig.from_options(SpecFormerOptions(), sizes)
    assert SpecFormerConfig.from_json(json.loads(json.dumps(specformer.to_json())), 64, (2, 4, 5)) == specformer


SCALED = {name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}
FORMS: dict[str, tuple[dict[str, Any], Rope]] = {
    "ours_before_scaling": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        Rope(rope_theta=5e5),
    ),
    "theta_alone": ({"rope_theta": 500000, "rope_scaling": None}, Rope(rope_theta=5e5)),
    "scaling_beside_theta": (
        {"rope_theta": 500000.0, "rope_scaling": {**SCALED, "rope_type": "llama3"}},
        Rope(**LLAMA3),
    ),
    "type_by_its_old_name": ({"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
                             Rope(rope_type="linear", rope_theta=1e6, factor=2.0)),
    "type_by_both_names": ({"rope_parameters": {**LLAMA3, "type": "llama3"}}, Rope(**LLAMA3)),
    "whole_heads": ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}, Rope()),
    "what_nobody_reads": ({"rope_parameters": {"rope_theta": 1e4, "factor": 4.0, "beta_fast": None}}, Rope()),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_config_json(form: str) -> None:
    config, expected = FORMS[form]
    assert Rope.from_json(config) == expected


FAULTY: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"rope_type": "dynamic", "factor": 2.0},
             r"rope_parameters.rope_type must be one of default, linear, llama3, yarn, got 'dynamic'"),
    "two_sets_of_angles": ({"rope_type": "longrope", "short_factor": [1.0]}, "must be one of .*, got 'longrope'"),
    "missing": ({"rope_type": "linear"}, "factor has no value; rope_type 'linear' needs one"),
    "no_number": ({"rope_type": "linear", "factor": "two"}, "rope_parameters.factor must be a number, got 'two'"),
    "zero": ({"rope_type": "linear", "factor": 0.0}, "factor must be above 0, got 0.0"),
    "images": ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "unknown key 'rope_parameters.mrope_section'"),
    "part_of_a_head": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
    # SGLang reads neither
    "attention_factor": ({**YARN, "attention_factor": 1.5}, "unknown key 'rope_parameters.attention_factor'"),
    "half_of_mscale": ({**YARN, "mscale": 1.0}, "mscale and mscale_all_dim must be given together"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_faulty_parameters_are_refused(fault: str) -> None:
    stored, message = FAULTY[fault]
    with pytest.raises(ValueError, match=message):
        Rope.from_json({"rope_parameters": {"rope_theta": 1e4, **stored}})


def test_a_missing_theta_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.json has no 'rope_theta'"):
        Rope.from_json({})
