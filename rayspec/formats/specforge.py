"""EAGLE-3 of SpecForge (sgl-project/SpecForge, specforge/modeling/draft/llama3_eagle.py), which is SGLang's own form
(sglang/srt/models/llama_eagle3.py), and the one that `--to sglang` writes.

SafeAILab's tensors, with `architectures: [LlamaForCausalLMEagle3]`; `eagle_config.eagle_aux_hidden_state_layer_ids`
names tapped layers by their output where they are not the default. Its EAGLE-3.1 options (`fc_norm`, `norm_output`) are
refused.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rayspec.formats.eagle3 import named_taps, read_eagle3
from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.drafters.checkpoint_config import CheckpointInfo, empty_drafter
from sglang_ext.drafters.stock import EAGLE3, stock_config, stock_matrix, to_stock


def recognise(source: Source) -> bool:
    return source.config.get("architectures") == [EAGLE3.architecture]


def read(source: Source, target: Target) -> Converted:
    layer, taps = named_taps(source.config, str(source.path))
    size = source.config.get("draft_vocab_size")
    return read_eagle3(source, target, layer, source.tensors, taps, draft_vocab=size)


def as_stock(drafter: Converted, where: str) -> tuple[dict[str, Tensor], int]:
    """(stock tensors, rows of their head), the stored bits. Raises ValueError for what the stock form cannot hold."""
    if drafter.config.stock is not EAGLE3:
        raise ValueError(f"{where}: only EAGLE-3 has this form, not a {drafter.config.kind} drafter; use --to rayspec")
    info = CheckpointInfo(path=where, body=drafter.config, head=drafter.head, target=None)
    module = empty_drafter(info)
    module.load_state_dict(dict(drafter.tensors), assign=True)
    weight_SH, ids_S = stock_matrix(module.lm_head, where)
    body = {name: t for name, t in drafter.tensors.items() if not name.startswith("lm_head.")}
    tensors = to_stock(body, weight_SH.detach(), ids_S, vocab_size=drafter.config.vocab_size)
    return tensors, len(ids_S)


def write(
    drafter: Converted, target: Target, provenance: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, rows = as_stock(drafter, "--to sglang")
    dtype = target.dtype or drafter.dtype  # SGLang computes in what config.json says, whatever is stored
    return stock_config(drafter.config.to_json() | {"dtype": dtype}, rows), tensors
