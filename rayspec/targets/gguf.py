"""A GGUF file as a Hugging Face folder: weights dequantised, tokenizer with its chat template, provenance.

transformers reads the file's metadata, names and layouts; it cannot save what it loads from one, so the folder is
written here. It holds config.json, model.safetensors, the tokenizer's files, generation_config.json and rayspec.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sglang_ext.fingerprints import file_sha256
from sglang_ext.folder_kinds import CONVERTED, CONVERTED_TARGET, WEIGHTS
from sglang_ext.folders import save_tensors, written_whole

DTYPE = torch.bfloat16  # what the published weights have; four bits and a float16 scale lose less than 0.4% to it


def convert_gguf(file: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write `folder`, whole or not at all. Raises ValueError for a file that is no GGUF file of a language model that
    transformers knows."""
    with written_whole(folder, CONVERTED_TARGET) as temporary:
        _write(file, temporary, provenance)


def _write(file: Path, folder: Path, provenance: Mapping[str, Any]) -> None:
    config = _readable(file, lambda: AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
    config.dtype = DTYPE
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tokenizer = _readable(file, lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    tokenizer.save_pretrained(folder)
    save_tensors(gguf_tensors(file, config), folder / WEIGHTS, {"format": "pt"})
    config.architectures = [type(_empty_model(config)).__name__]
    config.save_pretrained(folder)
    stops = stop_ids(config, tokenizer)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=stops).save_pretrained(folder)
    text = json.dumps({**provenance, "gguf": file.name, "gguf_sha256": file_sha256(file)}, indent=2) + "\n"
    (folder / CONVERTED).write_text(text)


def gguf_tensors(file: Path, config: Any) -> dict[str, Tensor]:
    """The model's tensors in `DTYPE` under transformers' names, a tied head left out. Raises ValueError where some are
    missing."""
    model = _empty_model(config)
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model, torch_dtype=DTYPE)["tensors"]
    wanted = set(model.state_dict())
    if config.tie_word_embeddings:
        wanted.discard("lm_head.weight")
    missing = sorted(wanted - set(found))
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} tensors of a {config.model_type}, such as {missing[0]}")
    return {name: found[name].to(DTYPE).contiguous() for name in sorted(wanted)}


def _empty_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def stop_ids(config: Any, tokenizer: Any) -> list[int]:
    """The ids that end an answer: the config's and the tokenizer's own."""
    named = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return sorted({i for i in (*named, tokenizer.eos_token_id) if i is not None})


def _readable(file: Path, read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # the readers below have an exception for each fault of a file
        raise ValueError(
            f"{file} cannot be read as the GGUF file of a language model ({type(error).__name__}: {error}); give a "
            "whole file of an architecture that transformers knows, or a Hugging Face folder"
        ) from error
