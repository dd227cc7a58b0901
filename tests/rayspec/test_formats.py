"""Layouts of other projects, built here by hand from their description, against their own formulas written out plainly.

T = slots, H = hidden, V = vocabulary, S = draft vocabulary.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from target_kinds import SHAPE, V, save_target
from torch import Tensor
from torch.nn import functional as F

from rayspec.artifacts import load_artifacts
from rayspec.commands.convert import main
from rayspec.convert import prepare, write
from rayspec.formats.result import Target
from sglang_ext.drafters.checkpoint import load_drafter

H, INTER, HEADS, KV, D, S, EPS, THETA = SHAPE["hidden_size"], 24, 4, 2, 8, 12, 1e-5, 5000.0
KEPT = torch.tensor([1, 2, 3, 5, 8, 9, 13, 20, 21, 23, 24, 30])
LAYER = {
    **{"model_type": "llama", "hidden_size": H, "intermediate_size": INTER, "num_hidden_layers": 1},
    **{"num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": D, "hidden_act": "silu"},
    **{"rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None, "max_position_embeddings": 64, "vocab_size": V},
    **{"tie_word_embeddings": False, "attention_bias": False, "transformers_version": "4.53.2", "use_cache": True},
}
AFTER = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}  # outputs: inputs of 1, 3, 6
EXPORT = {"architectures": ["LlamaForCausalLMEagle3"]}
MODELOPT = {"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True, "use_mtp_layernorm": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "safeailab": {**LAYER, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": S, "torch_dtype": "float16"},
    "specforge": {**LAYER, **EXPORT, "draft_vocab_size": S, "eagle_config": AFTER},
    "modelopt": {
        **LAYER,
        **EXPORT,
        "draft_vocab_size": S,
        "eagle_config": AFTER | MODELOPT | {"parallel_draft_step": 1},
    },
    "speculators": {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.4.0"},
        **{"draft_vocab_size": S, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]},
        **{"transformer_layer_config": LAYER, "speculators_config": {"algorithm": "eagle3"}},
    },
}
LAYER_NAME = {"safeailab": "midlayer", "specforge": "midlayer", "modelopt": "layers.0", "speculators": "layers.0"}
TAPS = {"safeailab": (2, 4, 5), "specforge": (1, 3, 6), "modelopt": (1, 3, 6), "speculators": (1, 3, 6)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_target(tmp_path_factory.mktemp("target") / "tiny", "llama3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [23, 29]}))
    return folder


def random(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.3).half()


def eagle3_tensors(layer: str, *, mask: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        **{"fc": (H, 3 * H), "norm": (H,), "lm_head": (S, H)},
        **{f"{layer}.{n}": (H,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{layer}.self_attn.{n}_proj": (size * D, 2 * H) for n, size in (("q", HEADS), ("k", KV), ("v", KV))},
        **{f"{layer}.self_attn.o_proj": (H, HEADS * D), f"{layer}.mlp.down_proj": (H, INTER)},
        **{f"{layer}.mlp.{n}_proj": (INTER, H) for n in ("gate", "up")},
    }
    tensors = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors["d2t"] = KEPT - torch.arange(S)
    if mask:
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, KEPT, True)
    return tensors


def publish(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(dict(tensors), folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder


def published(folder: Path, name: str, **changes: Any) -> Path:
    return publish(folder, CONFIGS[name] | changes, eagle3_tensors(LAYER_NAME[name], mask=name != "modelopt"))


def convert(source: Path, folder: Path, target: Path, **options: Any) -> Any:
    conversion = prepare(source, folder, str(target), **options)
    write(conversion)
    return conversion


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight.float() * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotated(x_TAD: Tensor, positions_T: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin, as cnets.py has it."""
    angles = positions_T[:, None].float() / THETA ** (torch.arange(0, D, 2).float() / D)
    cos, sin = torch.cat([angles.cos()] * 2, -1)[:, None], torch.cat([angles.sin()] * 2, -1)[:, None]
    half = torch.cat([-x_TAD[..., D // 2 :], x_TAD[..., : D // 2]], -1)
    return x_TAD * cos + half * sin


def cnets_layer(
    t: Mapping[str, Tensor], layer: str, embed_TH: Tensor, hidden_TH: Tensor, start: int, cache: list[Tensor]
) -> Tensor:
    """`LlamaDecoderLayeremb` of cnets.py."""
    w = of_layer(t, layer)
    x = torch.cat([norm(embed_TH, w["input_layernorm"]), norm(hidden_TH, w["hidden_norm"])], -1)
    return decoder_layer(w, x, hidden_TH, start, cache)


def of_layer(t: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{layer}.").removesuffix(".weight"): v.float() for n, v in t.items() if n.startswith(layer)}


def decoder_layer(w: Mapping[str, Tensor], x: Tensor, hidden_TH: Tensor, start: int, cache: list[Tensor]) -> Tensor:
    """Of what attention reads and what it is added to, with a cache of keys and values: causal over all that was
    before."""
    T = len(x)
    positions = torch.arange(start, start + T)
    q = rotated((x @ w["self_attn.q_proj"].T).view(T, HEADS, D), positions)
    k = rotated((x @ w["self_attn.k_proj"].T).view(T, KV, D), positions)
    v = (x @ w["self_attn.v_proj"].T).view(T, KV, D)
    cache[:] = [torch.cat([old, new]) for old, new in zip(cache, (k, v), strict=True)] if cache else [k, v]
    keys, values = (c.repeat_interleave(HEADS // KV, dim=1) for c in cache)
    scores = torch.einsum("tad,sad->ats", q, keys) / math.sqrt(D)
    scores = scores.masked_fill(torch.arange(len(keys))[None] > positions[:, None], float("-inf"))
    out = torch.einsum("ats,sad->tad", scores.softmax(-1), values).reshape(T, HEADS * D)
    x = hidden_TH + out @ w["self_attn.o_proj"].T
    y = norm(x, w["post_attention_layernorm"])
    return x + (F.silu(y @ w["mlp.gate_proj"].T) * (y @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


@pytest.mark.parametrize("name", CONFIGS)
def test_eagle3_drafts_as_its_authors_formula_says(name: str, target: Path, tmp_path: Path) -> None:
    source = published(tmp_path / "published", name)
    assert convert(source, tmp_path / "ours", target).format == name
    drafter, info = load_drafter(tmp_path / "ours")
    assert info.target is not None
    assert info.target.tap_layers == TAPS[name]
    assert drafter.lm_head.ids.tolist() == KEPT.tolist()
    stored = load_file(source / "model.safetensors")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours["fc.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == Target.read(str(target)).dtype
    assert torch.equal(ours["fc.weight"], stored["fc.weight"])

    T, layer = 5, LAYER_NAME[name]
    taps, embeds, last = torch.randn(T, 3 * H), torch.randn(T, H), torch.randn(1, H)
    cache: list[Tensor] = []
    first = cnets_layer(stored, layer, embeds, taps @ stored["fc.weight"].float().T, 0, cache)
    second = cnets_layer(stored, layer, last, first[-1:], T, cache)  # the state before the norm goes on
    expected = [norm(x, stored["norm.weight"]) @ stored["lm_head.weight"].float().T for x in (first[-1], second[-1])]

    with torch.no_grad():
        ours_cache: list[Any] = []
        hidden, feature = drafter.step(embeds[None], drafter.fuse(taps[None]), torch.arange(T)[None], ours_cache)
        both = torch.cat([embeds[1:], last])[None]  # slot T - 1 of the second step reads `last`
        again, _ = drafter.step(both, feature, torch.arange(1, T + 1)[None], ours_cache)
        got = [drafter.lm_head.candidates(x[0, -1:])[0][0] for x in (hidden, again)]
    for ours_S, theirs_S in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_S, theirs_S, rtol=2e-5, atol=2e-5)  # float32, another order of sums


@pytest.mark.parametrize("to", ["sglang", "speculators"])
@pytest.mark.parametrize("vocabulary", ["reduced", "whole"])
def test_what_is_exported_comes_back_bit_for_bit(to: str, vocabulary: str, target: Path, tmp_path: Path) -> None:
    source = published(tmp_path / "published", "specforge")
    if vocabulary == "whole":
        tensors = {n: t for n, t in eagle3_tensors("midlayer").items() if n not in ("d2t", "t2d")}
        whole = CONFIGS["specforge"] | {"draft_vocab_size": V}
        source = publish(tmp_path / "whole", whole, tensors | {"lm_head.weight": random(V, H)})
    convert(source, tmp_path / "ours", target)
    convert(tmp_path / "ours", tmp_path / "theirs", target, to=to)
    back = convert(tmp_path / "theirs", tmp_path / "back", target)
    assert back.format == {"sglang": "specforge", "speculators": "speculators"}[to]
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "back/model.safetensors").read_bytes()
    one, other = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("ours", "back"))
    converted = one["rayspec"].pop("converted"), other["rayspec"].pop("converted")
    assert one == other
    assert [c["format"] for c in converted] == ["specforge", back.format]
    assert load_drafter(tmp_path / "back")[1].provenance["converted"]["source"] == "theirs"


def linear(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return x @ weight.float().T + bias.float()


EAGLE = {**{k: v for k, v in LAYER.items() if k != "attention_bias"}, "architectures": ["LlamaForCausalLM"]}


def eagle_tensors(embedding: Tensor) -> dict[str, Tensor]:
    """Of EAGLE-1: EAGLE-3's layer without the two norms before it, half as wide."""
    layer = {n: t for n, t in eagle3_tensors("layers.0").items() if n.startswith("layers.0")}
    for name in ("input_layernorm", "hidden_norm"):
        del layer[f"layers.0.{name}.weight"]
    for name in "qkv":
        layer[f"layers.0.self_attn.{name}_proj.weight"] = layer[f"layers.0.self_attn.{name}_proj.weight"][:, :H].clone()
    return {**layer, "embed_tokens.weight": embedding, "fc.weight": random(H, 2 * H), "fc.bias": random(H)}


@pytest.mark.parametrize("has_bias", [True, False])
def test_eagle_drafts_as_its_authors_formula_says(has_bias: bool, target: Path, tmp_path: Path) -> None:
    """`Model.forward` of cnets1.py: fc over embedding and feature, and a first layer without `input_layernorm`."""
    own = Target.read(str(target))
    stored = eagle_tensors(own.embedding_VG)
    if not has_bias:
        del stored["fc.bias"]
    source = publish(tmp_path / "published", EAGLE | {"bias": has_bias}, stored)
    conversion = convert(source, tmp_path / "ours", target)
    assert conversion.format == "eagle"
    assert "the head is the target's" in conversion.describe()
    drafter, info = load_drafter(tmp_path / "ours")
    assert info.kind == "eagle"
    assert info.target is not None
    assert info.target.tap_layers == ()

    T, w = 5, of_layer(stored, "layers.0")
    bias = stored.get("fc.bias", torch.zeros(H))
    features, embeds, last = torch.randn(T, H), torch.randn(T, H), torch.randn(1, H)
    cache: list[Tensor] = []

    def step(embed: Tensor, feature: Tensor, start: int) -> Tensor:
        x = linear(stored["fc.weight"], bias, torch.cat([embed, feature], -1))
        return decoder_layer(w, x, x, start, cache)

    first = step(embeds, features, 0)
    second = step(last, first[-1:], T)
    with torch.no_grad():
        ours_cache: list[Any] = []
        _, feature = drafter.step(embeds[None], drafter.fuse(features[None]), torch.arange(T)[None], ours_cache)
        both = torch.cat([embeds[1:], last])[None]  # slot T - 1 of the second step reads `last`
        hidden, again = drafter.step(both, feature, torch.arange(1, T + 1)[None], ours_cache)
        logits = drafter.lm_head.candidates(hidden[0, -1:])[0][0]
    # float32, another order of sums; no norm holds the states near 1
    torch.testing.assert_close(feature[0], first, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(again[0, -1], second[-1], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(logits, second[-1] @ own.head_VG.float().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, "has no fc.weight, so that it is no EAGLE drafter"),
        ({"lm_head.weight": torch.zeros(V, H)}, "lm_head.weight is a head of its own"),
        ({"layers.0.input_layernorm.weight": torch.ones(H)}, r"unknown layers\.0\.input_layernorm\.weight"),
        ({"embed_tokens.weight": torch.zeros(V, H)}, "embed_tokens.weight differs from the target's"),
    ],
)
def test_eagle_tensors_that_do_not_fit(change: Any, message: str, target: Path, tmp_path: Path) -> None:
    tensors = {
        n: t for n, t in (eagle_tensors(Target.read(str(target)).embedding_VG) | change).items() if t is not None
    }
    source = publish(tmp_path / "published", EAGLE, tensors)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "ours", str(target))


@pytest.mark.parametrize("own_head", [True, False], ids=["medusa_1", "medusa_2"])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_medusa(own_head: bool, file: str, target: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = {f"{i}.0.linear.{n}": random(*s) for i in range(2) for n, s in (("weight", (H, H)), ("bias", (H,)))}
    if own_head:
        stored |= {f"{i}.1.weight": random(V, H) for i in range(2)}
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    source = publish(tmp_path / "published", config, stored, file)
    conversion = convert(source, tmp_path / "ours", target, allow_pickle=file.endswith(".pt"))
    assert conversion.format == "medusa"
    drafter, _ = load_drafter(tmp_path / "ours")
    rows = Target.read(str(target)).head_VG
    hidden_TH = torch.randn(3, H)
    for i in range(2):
        state = hidden_TH + F.silu(linear(stored[f"{i}.0.linear.weight"], stored[f"{i}.0.linear.bias"], hidden_TH))
        head = drafter.lm_head.at(i) if own_head else drafter.lm_head
        got = head.candidates(drafter.state(i, hidden_TH, None))[0]
        expected = state @ (stored[f"{i}.1.weight"] if own_head else rows).float().T
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


HYDRA = {"hydra_num_heads": 2, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True}


def hydra_tensors(embedding: Tensor, bias: float = 0.0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    stored = {"input_embed_fn.weight": embedding}
    for i in range(2):
        for part in ("linear", "res_connection"):
            stored |= {
                f"hydra_mlp.{i}.0.{part}.weight": random(H, (i + 2) * H),
                f"hydra_mlp.{i}.0.{part}.bias": random(H),
            }
        stored |= {f"hydra_lm_head.{i}.weight": random(V, H), f"hydra_lm_head.{i}.bias": bias * random(V)}
    return stored


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_hydra(bias: float, target: Path, tmp_path: Path) -> None:
    stored = hydra_tensors(Target.read(str(target)).embedding_VG, bias)
    source = publish(tmp_path / "published", HYDRA, stored, "hydra_lm_head.pt")
    assert convert(source, tmp_path / "ours", target, allow_pickle=True).format == "hydra"
    drafter, info = load_drafter(tmp_path / "ours")
    assert info.head.spec() == ({"kind": "full", "bias": True} if bias else {"kind": "full"})
    hidden_TH, path = torch.randn(3, H), [torch.randn(3, H), torch.randn(3, H)]
    for i in range(2):
        x = torch.cat([hidden_TH, *path[: i + 1]], -1)  # of `HydraMLP.forward`: hydra_inputs[: i + 2]
        w = {n.removeprefix(f"hydra_mlp.{i}.0."): t for n, t in stored.items() if n.startswith(f"hydra_mlp.{i}.")}
        state = linear(w["res_connection.weight"], w["res_connection.bias"], x)
        state = state + F.silu(linear(w["linear.weight"], w["linear.bias"], x))
        got = drafter.lm_head.at(i).candidates(drafter.state(i, hidden_TH, torch.stack(path[: i + 1], 1)))[0]
        expected = linear(stored[f"hydra_lm_head.{i}.weight"], stored[f"hydra_lm_head.{i}.bias"], state)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_frspec_list_becomes_a_calibration(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "freq_4.pt"
    torch.save([7, 5, 23, 0, 5], file)  # fr.py appends what it encodes even where it is there
    conversion = convert(file, tmp_path / "ours", target, allow_pickle=True)
    own = Target.read(str(target)).frozen
    tensors, description = load_artifacts(tmp_path / "ours", own.info(), own.eos_ids)
    assert conversion.format == "frspec"
    assert description["source"]["source"] == "freq_4.pt"
    assert tensors["ids"].tolist() == [23, 29, 7, 5, 0]
    assert "the stop tokens [29] were not in the list" in conversion.describe()


@pytest.mark.parametrize("name", ["safeailab", "specforge"])
def test_layers_that_are_named_for_vllm_are_tapped(name: str, target: Path, tmp_path: Path) -> None:
    named = {"eagle_config": {"use_aux_hidden_state": True}, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    convert(published(tmp_path / "published", name, **named), tmp_path / "ours", target)
    info = load_drafter(tmp_path / "ours")[1]
    assert info.target is not None
    assert info.target.tap_layers == (1, 3, 6)


LAYER_OF = {"num_hidden_layers": 2}
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("several_layers", "specforge", LAYER_OF, "num_hidden_layers must be 1, got 2"),
    ("norm_before_fc", "specforge", {"norm_before_fc": True}, "norm_before_fc must be False, got True"),
    ("eagle_3_1", "specforge", {"fc_norm": True}, "fc_norm must be False, got True"),
    ("norm_output", "specforge", {"norm_output": True}, "the next step reads the state before the last norm"),
    ("biases", "safeailab", {"attention_bias": True}, "attention_bias must be False, got True"),
    ("tied", "specforge", {"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
    ("mtp", "specforge", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers must be 0, got 1"),
    ("window", "specforge", {"sliding_window": 16}, "sliding_window must be absent, got 16"),
    ("quantized", "modelopt", {"quantization_config": {"quant_algo": "FP8"}}, "convert the drafter before"),
    ("unknown_key", "specforge", {"attn_gate": 1}, "attn_gate \\(1\\) is a key that this release does not know"),
    ("hidden_size", "specforge", {"target_hidden_size": 8}, "must equal the target's"),
    ("vocabulary", "specforge", {"vocab_size": 31, "draft_vocab_size": S}, "t2d|vocab_size is 31"),
    ("draft_vocabulary", "specforge", {"draft_vocab_size": 11}, "draft_vocab_size is 11, but lm_head.weight has 12"),
    ("taps", "specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 7]}}, "in 1..7 of"),
    ("fewer_taps", "specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}, "fc.weight has shape"),
    (
        "taps_that_differ",
        "specforge",
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
        r"is \[1, 3, 5\], .*input is tapped.* it is \[0, 2, 5\], .*output.* one less there; take out",
    ),
    (
        "taps_in_a_layer",
        "speculators",
        {"transformer_layer_config": LAYER | {"eagle_aux_hidden_state_layer_ids": [2]}},
        "is a key",
    ),
    ("taps_as_text", "safeailab", {"eagle_aux_hidden_state_layer_ids": "1, 3"}, "must be a list of layers, got '1, 3'"),
    (
        "parallel",
        "modelopt",
        {"eagle_config": AFTER | MODELOPT | {"parallel_draft_step": 4}},
        "parallel_draft_step must",
    ),
    ("residual", "speculators", {"norm_before_residual": True}, "the residual is the state before its norm"),
    ("kind", "speculators", {"speculators_model_type": "dflash"}, "speculators_model_type must be eagle3"),
    (
        "layer_kind",
        "speculators",
        {"transformer_layer_config": LAYER | {"model_type": "qwen3"}},
        "model_type must be llama",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_refused_with_the_reason(
    name: str, changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    source = published(tmp_path / "published", name, **changes)
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "ours", str(target))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(HEADS * D)}, "unknown midlayer.self_attn.q_proj.bias"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(D)}, "unknown midlayer.self_attn.q_norm.weight"),
        ({"midlayer.hidden_norm.weight": None}, "missing midlayer.hidden_norm.weight"),
        ({"lm_head.weight": None}, "missing lm_head.weight"),
        ({"d2t": KEPT}, "d2t \\(offsets: target id = i \\+ d2t"),  # absolute ids
        ({"d2t": None}, "no d2t says of which tokens"),
        ({"t2d": torch.ones(V, dtype=torch.bool)}, "t2d must be true exactly at the tokens"),
        ({"embed_tokens.weight": torch.ones(V, H)}, "embed_tokens.weight differs from the target's"),
        ({"norm.weight": torch.full((H,), float("nan"))}, "norm.weight holds NaN"),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], message: str, target: Path, tmp_path: Path) -> None:
    tensors = {n: t for n, t in (eagle3_tensors("midlayer") | changes).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        prepare(publish(tmp_path / "published", CONFIGS["specforge"], tensors), tmp_path / "ours", str(target))


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (HYDRA | {"hydra_head_arch": "prefix-mlp"}, hydra_tensors, "hydra_head_arch must be mlp, got 'prefix-mlp'"),
        (HYDRA | {"grounded_heads": False}, hydra_tensors, "grounded_heads must be True"),
        (HYDRA, lambda e: hydra_tensors(torch.zeros_like(e)), "differs from the target's embedding"),
        ({"medusa_num_heads": 2, "medusa_num_layers": 2}, hydra_tensors, "medusa_num_layers must be 1, got 2"),
        ({"medusa_num_heads": 2}, lambda e: {"0.0.linear.weight": e[:H]}, "weights are of the heads 0; correct"),
        ({"medusa_num_heads": 10**9}, lambda e: {"0.0.linear.weight": e[:H]}, "medusa_num_heads is 1000000000"),
        ({"medusa_num_heads": "2"}, hydra_tensors, "medusa_num_heads must be a whole number"),
        (HYDRA | {"hydra_num_heads": 10**9}, hydra_tensors, "positions must be in 1..128"),
        ({"speculators_model_type": "eagle3"}, hydra_tensors, "transformer_layer_config must be a mapping, got None"),
        ({"architectures": 5}, hydra_tensors, "of no format that we know"),
        ({"architectures": ["GPT2"]}, hydra_tensors, "of no format that we know"),
    ],
)
def test_heads_that_cannot_be_held(config: Any, tensors: Any, message: str, target: Path, tmp_path: Path) -> None:
    source = publish(tmp_path / "published", config, tensors(Target.read(str(target)).embedding_VG))
    with pytest.raises(ValueError, match=message):
        prepare(source, tmp_path / "ours", str(target))


class Call:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def test_nothing_is_unpickled(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = publish(tmp_path / "published", CONFIGS["safeailab"], eagle3_tensors("midlayer"), "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a pickle can run code when it is read.*--allow-weights-only-pickle"):
        prepare(source, tmp_path / "ours", str(target))
    assert prepare(source, tmp_path / "ours", str(target), allow_pickle=True).format == "safeailab"
    torch.save({"fc.weight": Call()}, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no file of tensors alone"):
        prepare(source, tmp_path / "ours", str(target), allow_pickle=True)
    assert capsys.readouterr().out == ""


def test_command(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = published(tmp_path / "published", "specforge"), tmp_path / "ours"
    arguments = [str(source), str(folder), "--target", str(target)]
    assert main([*arguments, "--plan"]) == 0
    assert not folder.exists()
    assert "warning: its head lacks the stop tokens [29]" in capsys.readouterr().out
    assert main(arguments) == 0
    assert main(arguments) == 0  # again: of ours, replaced whole
    (folder / "notes.txt").write_text("mine")
    assert main(arguments) == 2
    assert "nothing of it is deleted" in capsys.readouterr().err
    assert main([*arguments, "--to", "gguf"]) == 2
    assert "unknown --to 'gguf'; known: rayspec, sglang, speculators" in capsys.readouterr().err
