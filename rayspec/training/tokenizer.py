"""A byte-level BPE tokenizer for Python source, in which a newline and the indentation after it are one token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # separates documents; bos and eos as well
# GPT-4's splitting, with the newline rule put first: a run of blank space that holds a newline is one piece, so
# "\n        return" is the two pieces "\n        " and "return" whatever the depth.
SPLIT = r"\s*\n\s*|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn `vocab_size` entries (256 bytes and END_OF_TEXT, id 0, included) from the texts."""
    if vocab_size < 257:
        raise ValueError(f"model.vocab_size must be at least 257 (256 bytes and {END_OF_TEXT}), got {vocab_size}")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def token_byte_lengths(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """UTF-8 bytes that each token id stands for; 0 for the special token, which is no text."""
    # byte-level BPE spells every byte as one printable character, so a token's length is its byte count
    lengths = [0] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if token == END_OF_TEXT else len(token)
    return lengths


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save_pretrained(str(folder))
    path = Path(folder) / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # version 5 writes a name of its own, which it alone knows
    for key in ("backend", "is_local", "local_files_only"):  # of the saving process, not of the tokenizer
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a saved tokenizer as this class whatever `config.json` beside it says of the model type."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
