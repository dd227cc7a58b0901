"""A target as far as it can be read without loading it: config, tokenizer, and the headers of its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rayspec.messages import first_line
from rayspec.shipped import target_path

INDEX = "model.safetensors.index.json"  # where weights are in several files


@dataclass(frozen=True, kw_only=True)
class TargetModel:
    """`config` and `tokenizer` are those of transformers; `path` is a folder or a Hugging Face name."""

    path: str
    config: Any
    tokenizer: Any

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and answer that it was made for, as SGLang reads it; None where the config does not say."""
        length = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_scaling", None) or {}
        is_counted_in = "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3"
        return None if length is None else int(length * (1 if is_counted_in else rope.get("factor") or 1))


def cached_snapshot(name: str) -> Path | None:
    """The folder in this machine's cache with the files of a Hugging Face name; it is named by their commit. None where
    there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        return None


def read_target(
    name: str,
    *,
    tokenizer: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    needs_weights: bool = True,
) -> TargetModel:
    """The target of that name: a fetched one, a folder, or a Hugging Face name, which is looked up. Raises ValueError
    for one that is not there, not whole, or of no use to an engine.

    Args:
        tokenizer: where the tokenizer is, None for beside the model.
        needs_weights: look whether a folder's are whole.
    """
    from transformers import AutoConfig, AutoTokenizer  # seconds, which a typing error should not wait for
    from transformers.utils import logging

    path = target_path(name)
    is_folder = os.path.isdir(path)
    if is_folder and needs_weights:
        check_weights(path)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": is_folder}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the error below says all about a config that cannot be read
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, **options)
        found = AutoTokenizer.from_pretrained(tokenizer or path, revision=revision, **options)
        text_config = config.get_text_config()
    except Exception as error:  # the libraries below raise what they like for files that they do not understand
        cause = first_line(error)
        where = f"{path} has no config.json and tokenizer that can be read" if is_folder else (
            "there is no such folder, and as a Hugging Face name it cannot be read"
        )  # fmt: skip
        raise ValueError(f"target is {name!r}: {where} ({cause}); give the folder or the name of a model") from error
    finally:
        logging.set_verbosity(verbosity)
    for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
        value = getattr(text_config, size, None)
        if type(value) is not int or value < 1:
            raise ValueError(f"target is {name!r}, whose config.json has {size} {value!r}; it must be a whole number")
    return TargetModel(path=path, config=text_config, tokenizer=found)


def check_weights(folder: str | Path) -> None:
    """Raise ValueError unless a target's folder holds whole weights: safetensors, all files of their index."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"the target {folder} holds no *.safetensors; pickled weights are not read")
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no whole safetensors file ({error}); copy the target again") from error
    missing = sorted(set(_indexed(Path(folder) / INDEX)) - {file.name for file in files})
    if missing:
        raise ValueError(f"the target {folder} lacks {', '.join(missing)}, which {INDEX} names; copy it again")


def _indexed(index: Path) -> Iterable[str]:
    if not index.is_file():
        return ()
    try:
        return json.loads(index.read_text())["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(f"{index} is no index of weights ({error!r}); copy the target again") from error
