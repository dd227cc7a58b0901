"""EAGLE-3 as its authors publish it (SafeAILab/EAGLE, eagle/model/cnets.py `Model`; ea_model.py loads it).

`midlayer.*`, `fc.weight` without a bias over three taps, `norm.weight`, `lm_head.weight` over draft_vocab_size tokens;
`d2t` int64 holds offsets (target id = i + d2t[i], cnets.py `topK_genrate`), `t2d` is a mask; both are there only for a
reduced vocabulary. The taps are the inputs of the layers 2, L // 2 and L - 3 (modeling_llama_kv.py), unless somebody
has named others for SGLang or vLLM. `architectures` is [LlamaForCausalLM]. Published as pytorch_model.bin.
"""

from rayspec.formats.eagle3 import named_taps, read_eagle3
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source


def recognise(source: Source) -> bool:
    return "draft_vocab_size" in source.config and "transformer_layer_config" not in source.config


def read(source: Source, target: Target) -> Converted:
    size = source.config.get("draft_vocab_size")
    layer, taps = named_taps(source.config, str(source.path))
    return read_eagle3(source, target, layer, source.tensors, taps, draft_vocab=size)
