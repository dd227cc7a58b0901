"""EAGLE-3 as NVIDIA ModelOpt exports it (NVIDIA/Model-Optimizer, modelopt/torch/export/plugins/hf_spec_export.py).

SGLang's architecture with `layers.0.*` for the layer, no `t2d`, `d2t` as offsets for a reduced vocabulary, the target's
`lm_head.weight` where the drafter has none of its own, and options of the module in `eagle_config`: several layers,
parallel drafting and other norms are refused.
"""

from rayspec.formats.eagle3 import named_taps, read_eagle3
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.drafters.stock import EAGLE3

OWN = {"use_last_layernorm", "use_input_layernorm_in_first_layer", "use_mtp_layernorm", "next_layer_regular"}


def recognise(source: Source) -> bool:
    is_stock = source.config.get("architectures") == [EAGLE3.architecture]
    options = source.config.get("eagle_config")
    return is_stock and isinstance(options, dict) and bool(OWN & set(options))


def read(source: Source, target: Target) -> Converted:
    layer, taps = named_taps(source.config, str(source.path))
    size = source.config.get("draft_vocab_size")
    return read_eagle3(source, target, layer, source.tensors, taps, draft_vocab=size)
