"""The target's tokens as calibration sees them: how many, which ends an answer, which no draft may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayspec.messages import first_line
from sglang_ext.drafters.target import vocabulary_sha256


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """`size` counts the LM head's rows, which may be more than the tokenizer has tokens."""

    target: str
    size: int
    tokenizer_sha256: str
    stop_ids: tuple[int, ...]  # ascending
    unusable_ids: tuple[int, ...] = ()  # special tokens and padding rows, without the stop ids

    def __post_init__(self) -> None:
        assert self.stop_ids, "a vocabulary without a stop token"
        assert not set(self.stop_ids) & set(self.unusable_ids), "a stop token is always usable"

    @property
    def num_usable(self) -> int:
        return self.size - len(self.unusable_ids)

    @classmethod
    def load(cls, folder: str | Path, name: str) -> Vocabulary:
        """The vocabulary of a Hugging Face folder; its weights are not read. Raises ValueError."""
        from transformers import AutoConfig, PreTrainedTokenizerFast  # takes seconds

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
            size = config.vocab_size
        except Exception as error:  # the libraries raise what they like for files that they do not understand
            cause = first_line(error)
            raise ValueError(
                f"target={folder} has no tokenizer.json and config.json that can be read; give the folder of a Hugging "
                f"Face model, nothing is downloaded ({cause})"
            ) from error
        if type(size) is not int or not tokenizer.get_vocab():
            raise ValueError(f"target={folder} has vocab_size {size!r} and {len(tokenizer)} tokens; copy it again")
        tokens = tokenizer.get_vocab()
        if max(tokens.values()) >= config.vocab_size:
            raise ValueError(
                f"target={folder}: the tokenizer has ids up to {max(tokens.values())}, but the model only "
                f"{config.vocab_size} rows; use the tokenizer that belongs to the model"
            )
        stop_ids = {tokenizer.eos_token_id, *_eos_ids(config), *_eos_ids(_generation_config(folder, config))} - {None}
        if not stop_ids:
            raise ValueError(
                f"target={folder} names no stop token, so a reduced head could not be given one; set eos_token_id in "
                "its generation_config.json"
            )
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        padding = set(range(config.vocab_size)) - set(tokens.values())
        return cls(
            target=name,
            size=config.vocab_size,
            tokenizer_sha256=vocabulary_sha256(tokens),
            stop_ids=tuple(sorted(stop_ids)),
            unusable_ids=tuple(sorted((special | set(tokenizer.all_special_ids) | padding) - stop_ids)),
        )


def _generation_config(folder: str | Path, config: Any) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except OSError:
        return config  # which is where transformers takes it from then


def _eos_ids(config: Any) -> list[int]:
    ids = getattr(config, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
