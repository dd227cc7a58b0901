"""EAGLE-1 and 2 as SafeAILab publishes them (SafeAILab/EAGLE, eagle/model/cnets1.py; cnets.py before EAGLE-3).

`fc.weight` [H, 2H] over embedding and feature, `fc.bias` where `bias` is true (the default), and one Llama layer
`layers.0` without `input_layernorm`. No head: the target's LM head reads the layer's output. `architectures` is
[LlamaForCausalLM], as an ordinary model's of one layer, and there is no `draft_vocab_size`.
"""

import torch

from rayspec.formats.eagle3 import HARMLESS, MUST, READ, check_embedding, check_keys
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.adapter.target_hosts import check_host
from sglang_ext.drafters.eagle.config import EagleConfig
from sglang_ext.heads.full import FullConfig

OWN_MUST = {**MUST, "bias": (True, False)}


def recognise(source: Source) -> bool:
    config = source.config
    is_layer = config.get("architectures") == ["LlamaForCausalLM"] and config.get("num_hidden_layers") == 1
    return is_layer and "draft_vocab_size" not in config


def read(source: Source, target: Target) -> Converted:
    path, config = str(source.path), dict(source.config)
    check_host(target.frozen.model.config)
    check_keys(config, OWN_MUST, READ | HARMLESS, path)
    # configs from before grouped queries lack it
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    try:
        body = EagleConfig.from_json({**config, "bias": True}, config.get("hidden_size", 0), ())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    ours, notes = {}, []
    for name, tensor in source.tensors.items():
        if name == "embed_tokens.weight":
            check_embedding(tensor, target, path)
            notes.append("embed_tokens.weight is the target's, bit for bit, and not stored again")
        elif name.endswith("rotary_emb.inv_freq"):
            notes.append(f"{name} follows from the config, and is not stored")
        elif name.startswith("lm_head."):
            raise ValueError(f"{path}: {name} is a head of its own, which no EAGLE-1 or 2 drafter has; it is not read")
        else:
            ours[name] = tensor
    if "fc.weight" not in ours:
        raise ValueError(f"{path} has no fc.weight, so that it is no EAGLE drafter; name its --format")
    if not config.get("bias", True):
        if "fc.bias" in ours:
            raise ValueError(f"{path}: bias is false, but there is a fc.bias; correct config.json")
        ours["fc.bias"] = torch.zeros(len(ours["fc.weight"]), dtype=ours["fc.weight"].dtype)
        notes.append("it has no fc.bias; zeros are stored, which change nothing")
    ours["lm_head.weight"] = target.head_VG
    notes.append("the head is the target's")
    return Converted(config=body, head=FullConfig(), tensors=ours, notes=tuple(notes))
