"""EAGLE-3 as NVIDIA ModelOpt exports it (NVIDIA/Model-Optimizer, modelopt/torch/export/plugins/hf_spec_export.py).

SGLang's architecture with `layers.0.*` for the layer, no `t2d`, `d2t` as offsets for a reduced vocabulary, the target's
`lm_head.weight` where the drafter has none of its own, and options of the module in `eagle_config`: several layers,
parallel drafting and other norms are refused.
"""

from rayspec.formats.source import Source
from rayspec.formats.specforge import read
from sglang_ext.drafters.stock import EAGLE3

__all__ = ["read", "recognise"]

OWN = {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm", "next_layer_regular"}


def recognise(source: Source) -> bool:
    is_stock = source.config.get("architectures") == [EAGLE3.architecture]
    options = source.config.get("eagle_config")
    return is_stock and isinstance(options, dict) and bool(OWN & set(options))
