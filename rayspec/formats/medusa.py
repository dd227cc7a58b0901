"""Medusa's heads (FasterDecoding/Medusa, medusa/model/medusa_model_legacy.py; train_legacy.py saves them).

medusa_lm_head.pt (or the same names as safetensors) is the state dict of a list of heads: `<i>.0.linear.{weight,bias}`
of one residual block, x + SiLU(linear x), then `<i>.1.weight`, a vocabulary projection of its own (Medusa-1's first
release) or none: then the target's LM head reads the state (version 2), and its rows are taken from there. Blocks in a
row are one block, used several times ([ResBlock] * n), which we have no form of.
"""

from typing import Any

from rayspec.formats.eagle3 import check_keys
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.drafters.medusa.config import MedusaConfig
from sglang_ext.heads.full import FullConfig
from sglang_ext.settings import check_type

MUST: dict[str, tuple[Any, ...]] = {"medusa_num_layers": (1,), "quantization_config": (None,)}
KNOWN = {
    *("medusa_num_heads", "version", "base_model_name_or_path", "architectures", "transformers_version", "model_type"),
    *("dtype", "torch_dtype", "hidden_size", "vocab_size", "_name_or_path"),
}


def recognise(source: Source) -> bool:
    return "medusa_num_heads" in source.config


def read(source: Source, target: Target) -> Converted:
    config, path = source.config, str(source.path)
    check_keys(config, MUST, KNOWN, path)
    stored = {name.removeprefix("medusa_head."): t for name, t in source.tensors.items()}
    heads = config["medusa_num_heads"]
    check_type(f"{path}: medusa_num_heads", heads, int)
    there = {name.partition(".")[0] for name in stored}
    if len(there) != heads or there != {str(i) for i in range(heads)}:
        raise ValueError(
            f"{path}: medusa_num_heads is {heads}, but its weights are of the heads {', '.join(sorted(there))}; "
            "correct medusa_num_heads in config.json"
        )
    own = [name for name in stored if name.endswith(".1.weight")]
    if own and len(own) != heads:
        raise ValueError(f"{path}: {len(own)} of {heads} heads have a projection of their own; it must be all or none")
    ours, notes = {}, []
    for name, tensor in stored.items():
        i, _, rest = name.partition(".")
        known = {
            "0.linear.weight": f"blocks.{i}.weight",
            "0.linear.bias": f"blocks.{i}.bias",
            "1.weight": f"lm_head.{i}.weight",
        }
        ours[known.get(rest, name)] = tensor  # a name that is not known is refused with the others
    if not own:
        ours["lm_head.weight"] = target.head_VG
        notes.append("lm_head.weight is the target's LM head, which reads all positions")
    sizes = target.frozen.sizes()
    body = MedusaConfig(positions=heads, shared_head=not own, **{name: sizes[name] for name in MedusaConfig.of_target})
    return Converted(config=body, head=FullConfig(), tensors=ours, notes=tuple(notes))
