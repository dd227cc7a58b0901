"""Hydra's heads (zankner/Hydra, hydra/model/hydra_heads/; hydra/train/train.py saves hydra_lm_head.pt).

Head i reads [h; E(y_0); ...; E(y_i)], the embeddings as they are: `hydra_mlp.<i>.0.res_connection` (with a bias) plus
SiLU of `hydra_mlp.<i>.0.linear`, then `hydra_lm_head.<i>`, which has a bias, too (`bias` of a full head; left out where
all are zero). Only grounded heads of the arch `mlp` with one layer that read the last hidden state are these; Hydra++
(`prefix-mlp`) has a Llama layer before them.
"""

from typing import Any

import torch

from rayspec.formats.eagle3 import check_keys
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.drafters.hydra.config import HydraConfig
from sglang_ext.heads.full import FullConfig
from sglang_ext.settings import check_type

MUST: dict[str, tuple[Any, ...]] = {
    "hydra_head_arch": ("mlp",),
    "hydra_num_layers": (1,),
    "grounded_heads": (True,),
    "hidden_state_offset": (0,),
    "quantization_config": (None,),
}
KNOWN = {
    *("hydra_num_heads", "base_model_name_or_path", "architectures", "transformers_version", "model_type"),
    *("dtype", "torch_dtype", "dropout_rate", "_name_or_path"),
}


def recognise(source: Source) -> bool:
    return "hydra_num_heads" in source.config


def read(source: Source, target: Target) -> Converted:
    config, path = source.config, str(source.path)
    check_keys({"hydra_head_arch": "mlp", "grounded_heads": False, "hydra_num_layers": 1, **config}, MUST, KNOWN, path)
    check_type(f"{path}: hydra_num_heads", config["hydra_num_heads"], int)
    ours, biases, notes = {}, {}, []
    for name, tensor in source.tensors.items():
        parts = name.removeprefix("hydra_head.").split(".")
        if parts[0] == "input_embed_fn":
            if not torch.equal(tensor, target.embedding_VG.to(tensor.dtype)):
                raise ValueError(
                    f"{path}: {name} differs from the target's embedding, which drafts read; name its own target"
                )
            notes.append(f"{name} is the target's, bit for bit, and not stored again")
        elif parts[0] == "hydra_lm_head" and parts[-1] == "bias":
            biases[f"lm_head.{parts[1]}.bias"] = tensor
        elif parts[0] == "hydra_mlp" and parts[2:3] == ["0"] and len(parts) == 5:
            part = {"linear": "blocks", "res_connection": "residuals"}.get(parts[3], parts[3])
            ours[f"{part}.{parts[1]}.{parts[-1]}"] = tensor
        else:
            ours[".".join(parts).replace("hydra_lm_head.", "lm_head.")] = tensor
    has_bias = any(bool(bias.any()) for bias in biases.values())
    if has_bias:
        ours |= biases
    elif biases:
        notes.append("the biases of hydra_lm_head are zero, and left out")
    sizes = {name: target.frozen.sizes()[name] for name in HydraConfig.of_target}
    body = HydraConfig(positions=config["hydra_num_heads"], as_published=True, **sizes)
    return Converted(config=body, head=FullConfig(bias=has_bias), tensors=ours, notes=tuple(notes))
