"""What the formats of EAGLE-3 have in common: the config of one Llama layer over tapped states, and its tensors.

Every key of a config.json is read, harmless, or one whose value decides the mathematics and must be the one that our
module computes (that is, SGLang's `LlamaForCausalLMEagle3`). A key that is none of these is refused: what it means is
not known. H = hidden, V = vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.adapter.target_hosts import check_host
from sglang_ext.drafters.eagle3.config import Eagle3Config
from sglang_ext.drafters.stock import from_stock
from sglang_ext.drafters.target import TAPS, stored_taps, taps_for_vllm
from sglang_ext.heads.full import FullConfig
from sglang_ext.heads.truncated import TruncatedConfig
from sglang_ext.json_text import check_mapping
from sglang_ext.settings import check_type

READ = {
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("draft_vocab_size", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
    *("max_position_embeddings", "target_hidden_size", "num_aux_hidden_states", "eagle_config"),
}
HARMLESS = {
    *(
        "architectures",
        "auto_map",
        "name_or_path",
        "_name_or_path",
        "model_name",
        "target_model_type",
        "transformers_version",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "dtype", "torch_dtype", "use_cache"),
    *("initializer_range", "attention_dropout", "pretraining_tp", "max_window_layers", "_attn_implementation"),
    *("attn_implementation", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"),
    *("is_encoder_decoder", "id2label", "label2id", "problem_type", "base_model_tp_plan", "base_model_ep_plan"),
}
REASONS = {
    "num_hidden_layers": "the drafter has one layer",
    "norm_before_residual": "in SGLang the residual is the state before its norm",
    "norm_output": "in SGLang's stock form the next step reads the state before the last norm",
    "tie_word_embeddings": "the drafter's head is its own; set it to false if lm_head.weight is the drafter's",
    "parallel_drafting": "the drafter drafts one token a step",
    "quantization_config": "convert the drafter before it is quantized",
}
MUST: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "num_hidden_layers": (1,),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "bias": (False, None),
    "tie_word_embeddings": (False, None),
    "norm_before_residual": (False, None),
    "norm_before_fc": (False, None),
    "fc_norm": (False, None),
    "use_aux_norm": (False, None),
    "norm_output": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "layer_types": (None, ["full_attention"]),
    "position_embedding_type": ("rope", None),
    "parallel_drafting": (False, None),
    "num_nextn_predict_layers": (0, None),
    "quantization_config": (None,),
}
EAGLE_MUST: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "norm_before_fc": (False, None),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False, None),
    "parallel_draft_step": (0, 1, None),
}
EAGLE_HARMLESS = {
    *(TAPS, "next_layer_regular", "parallel_draft_heads_num_layers", "has_lm_head"),
}


def check_keys(
    config: Mapping[str, Any], must: Mapping[str, tuple[Any, ...]], known: set[str], path: str, section: str = ""
) -> None:
    """Raise ValueError for a value that we do not compute with, and for a key that is not known."""
    for key, value in config.items():
        if key in must:
            if value not in must[key]:
                allowed = " or ".join(str(v) for v in must[key] if v is not None) or "absent"
                reason = REASONS.get(key, "no drafter that SGLang's stock form or ours computes has it")
                raise ValueError(f"{path}: {section}{key} must be {allowed}, got {value!r}: {reason}")
        elif key not in known:
            raise ValueError(
                f"{path}: {section}{key} ({value!r}) is a key that this release does not know; if it changes nothing "
                "of what the drafter computes, take it out of config.json and convert again"
            )


def read_eagle3(
    source: Source,
    target: Target,
    layer: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    taps: tuple[int, ...] | None,
    *,
    draft_vocab: int | None,
) -> Converted:
    """The drafter of a Llama layer's config and tensors under the names of any of these formats.

    Args:
        layer: a Hugging Face config of the layer.
        taps: the layers whose input is tapped; None for EAGLE-3's default three.

    Raises ValueError for all that does not fit.
    """
    path = str(source.path)
    check_host(target.frozen.model.config)
    unused_window = not layer.get("use_sliding_window", True)  # Qwen's: a window that nothing looks at
    checked = {k: v for k, v in layer.items() if not (k == "sliding_window" and unused_window)}
    check_keys(checked, MUST, READ | HARMLESS, path)
    eagle = check_mapping(layer.get("eagle_config") or {}, f"{path}: eagle_config")
    check_keys(eagle, EAGLE_MUST, EAGLE_HARMLESS, path, "eagle_config.")
    target_hidden: Any = layer.get("target_hidden_size") or layer.get("hidden_size")
    found = taps if taps is not None else target.frozen.taps
    named = {"eagle_config": {TAPS: [i - 1 for i in found]}}
    try:
        config = Eagle3Config.from_json({**layer, **named}, target_hidden, found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if draft_vocab is not None:
        check_type(f"{path}: draft_vocab_size", draft_vocab, int)
    asked = layer.get("num_aux_hidden_states") or len(found)
    if asked != len(found):
        raise ValueError(f"{path}: num_aux_hidden_states is {asked}, but {len(found)} layers are tapped: {list(found)}")

    ours, notes = {}, []
    for name, tensor in tensors.items():
        name = config.own_name(name.removeprefix("model."))
        if name == "embed_tokens.weight":
            check_embedding(tensor, target, path)
            notes.append("embed_tokens.weight is the target's, bit for bit, and not stored again")
        elif name.endswith("rotary_emb.inv_freq"):
            notes.append(f"{name} follows from the config, and is not stored")
        else:
            ours[name] = tensor
    if "lm_head.weight" not in ours:
        raise ValueError(
            f"{path}: missing lm_head.weight; SGLang would read the target's LM head instead, which no drafter of ours "
            "does: put a copy of its rows there"
        )
    ours = from_stock(ours, vocab_size=config.vocab_size, path=path)
    rows = len(ours["lm_head.weight"])
    if draft_vocab is not None and rows != draft_vocab:
        raise ValueError(
            f"{path}: draft_vocab_size is {draft_vocab}, but lm_head.weight has {rows} rows; correct config.json"
        )
    head = TruncatedConfig(size=rows) if "lm_head.ids" in ours else FullConfig()
    return Converted(config=config, head=head, tensors=ours, notes=tuple(notes))


def named_taps(config: Mapping[str, Any], path: str) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """(the config without the key that is read here, the tapped layers or None). They are named by their output in
    `eagle_config`, for SGLang, or by their input in the config itself, for vLLM. Raises ValueError where the two
    differ."""
    try:
        if config.get("eagle_config") is not None:
            check_mapping(config["eagle_config"], "eagle_config")
        found, for_vllm = stored_taps(config), taps_for_vllm(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if found and for_vllm and found != for_vllm:
        raise ValueError(
            f"{path}: {TAPS} is {for_vllm}, which is read as layers whose input is tapped (vLLM), and in eagle_config "
            f"it is {[i - 1 for i in found]}, layers whose output is tapped (SGLang), so that it should be one less "
            "there; take out the one that is not meant"
        )
    return {key: value for key, value in config.items() if key != TAPS}, tuple(found or for_vllm) or None


def check_embedding(stored_VH: Tensor, target: Target, path: str) -> None:
    """Raise ValueError unless a stored embedding is the target's."""
    theirs_VG = target.embedding_VG
    if stored_VH.shape != theirs_VG.shape or not torch.equal(stored_VH, theirs_VG.to(stored_VH.dtype)):
        raise ValueError(
            f"{path}: embed_tokens.weight differs from the target's, whose embedding SGLang gives a drafter; such a "
            "drafter cannot be held (trained with its own embedding, or for another target)"
        )
