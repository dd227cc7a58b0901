"""EAGLE-3 of vLLM's speculators (vllm-project/speculators, src/speculators/models/eagle3/{config,core,
model_definitions}.py).

`transformer_layer_config` holds the layer's config; `layers.0.*` its tensors; `d2t` are offsets (core.py adds them to
the draft's ids), `t2d` is a mask, neither is there for a whole vocabulary; `embed_tokens.weight` may be left out.
`eagle_aux_hidden_state_layer_ids` names tapped layers by their input; None for the default three.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rayspec.formats.eagle3 import HARMLESS, check_keys, read_eagle3
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from rayspec.formats.specforge import as_stock
from sglang_ext.drafters.target import TAPS, taps_for_vllm
from sglang_ext.json_text import check_mapping

MUST: dict[str, tuple[Any, ...]] = {
    "speculators_model_type": ("eagle3",),
    "norm_before_residual": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "norm_output": (False, None),
    "tie_word_embeddings": (False, None),
    "quantization_config": (None,),
}
KNOWN = HARMLESS | {
    *("transformer_layer_config", "draft_vocab_size", "target_hidden_size", TAPS),
    *(
        "speculators_config",
        "speculators_version",
        "embed_requires_grad",
        "enable_sp_ulysses",
        "has_no_defaults_at_init",
    ),
}
TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's, beside the drafter while it is trained


def recognise(source: Source) -> bool:
    return "speculators_model_type" in source.config


def read(source: Source, target: Target) -> Converted:
    config, path = source.config, str(source.path)
    check_keys(config, MUST, KNOWN, path)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{path}: transformer_layer_config must be a mapping, got {layer!r}")
    algorithm = check_mapping(config.get("speculators_config") or {}, f"{path}: speculators_config").get(
        "algorithm", "eagle3"
    )
    if algorithm != "eagle3":
        raise ValueError(f"{path}: speculators_config.algorithm must be eagle3, got {algorithm!r}")
    try:
        taps = tuple(taps_for_vllm(config)) or None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tensors = {name: t for name, t in source.tensors.items() if name not in TRAINING}
    sizes = {"target_hidden_size": config["target_hidden_size"]} if config.get("target_hidden_size") else {}
    return read_eagle3(source, target, {**layer, **sizes}, tensors, taps, draft_vocab=config.get("draft_vocab_size"))


def write(
    drafter: Converted, target: Target, provenance: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, rows = as_stock(drafter, "--to speculators")
    body = drafter.config.to_json()
    rope = dict(body.pop("rope_parameters"))
    theta = rope.pop("rope_theta")
    for key in ("draft_vocab_size", "eagle_config", "dtype"):
        del body[key]
    greedy = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "dtype": drafter.dtype,
        "draft_vocab_size": rows,
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        TAPS: list(drafter.config.tap_layers),
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **body,
            "num_aux_hidden_states": len(drafter.config.tap_layers),
            **{"attention_bias": False, "mlp_bias": False, "rope_theta": theta},
            "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": target.name, "architectures": target.frozen.model.config.architectures},
        },
    }
    return config, {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
