"""The target's training data as token arrays, prepared once per run so that a resumed run reads the same stream."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rayspec.training import corpus
from rayspec.training.sources import STDLIB, CorpusConfig, Document, discover
from rayspec.training.target_config import WINDOW
from rayspec.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from sglang_ext.whole import write_whole


@dataclass(frozen=True, kw_only=True)
class TargetData:
    """Token streams (uint16, one dimension) with documents joined by the end-of-text token."""

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    held_out: dict[str, np.ndarray]  # "stdlib" and "packages"
    manifest: dict[str, Any]


def prepare(
    run_dir: Path,
    config: CorpusConfig,
    vocab_size: int,
    tokenizer_bytes: int,
    seed: int,
    documents: Sequence[Document] | None = None,
) -> TargetData:
    """Load the data of this run, or build it: the corpus depends on what is installed, so it is frozen on disk."""
    folder = run_dir / "data"
    if not (folder / "manifest.json").exists():  # written last, so its presence says that the rest is whole
        folder.mkdir(parents=True, exist_ok=True)
        documents = discover(config) if documents is None else documents
        training = corpus.training_documents(config, documents)
        held_out = corpus.held_out_documents(config, documents)
        if not training or not held_out:
            raise ValueError(f"the corpus has {len(training)} training and {len(held_out)} held-out files; need both")
        rng = random.Random(seed)
        tokenizer = train_tokenizer(_sample_texts(training, tokenizer_bytes, rng), vocab_size)
        save_tokenizer(tokenizer, folder / "tokenizer")
        training_tokens = _encode(tokenizer, training, "tokenise training files")
        held_out_tokens = _encode(tokenizer, held_out, "tokenise held-out files")
        order = [
            index
            for index, document in enumerate(training)
            for _ in range(config.stdlib_repeats if document.package.name == STDLIB else 1)
        ]
        rng.shuffle(order)
        np.save(folder / "train.npy", np.concatenate([training_tokens[i] for i in order]))
        groups: dict[str, list[np.ndarray]] = {"stdlib": [], "packages": []}
        for document, tokens in zip(held_out, held_out_tokens, strict=True):
            groups["stdlib" if document.package.name == STDLIB else "packages"].append(tokens)
        for name, arrays in groups.items():
            np.save(folder / f"held_out_{name}.npy", np.concatenate([np.zeros(0, np.uint16), *arrays]))
        write_json(
            folder / "manifest.json",
            corpus.manifest(
                config,
                [(d, len(t)) for d, t in zip(training, training_tokens, strict=True)],
                [(d, len(t)) for d, t in zip(held_out, held_out_tokens, strict=True)],
            ),
        )
    return TargetData(
        tokenizer=load_tokenizer(folder / "tokenizer"),
        train=np.load(folder / "train.npy", mmap_mode="r"),
        held_out={name: np.load(folder / f"held_out_{name}.npy") for name in ("stdlib", "packages")},
        manifest=json.loads((folder / "manifest.json").read_text()),
    )


class WindowSampler:
    """Window number → tokens, in an order fixed by the seed; each pass over the stream has an order of its own."""

    def __init__(self, stream: np.ndarray, seed: int) -> None:
        self.stream = stream
        self.seed = seed
        self.num_windows = (len(stream) - 1) // WINDOW
        if self.num_windows < 1:
            raise ValueError(f"the training stream has {len(stream)} tokens; at least {WINDOW + 1} are needed")
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, first_window: int, num_windows: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, int64 [num_windows * WINDOW // seq_len, seq_len] each; labels are one token ahead."""
        rows = np.stack([self._window(first_window + i) for i in range(num_windows)]).astype(np.int64)
        inputs, labels = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())
        return inputs.view(-1, seq_len), labels.view(-1, seq_len)

    def _window(self, number: int) -> np.ndarray:
        epoch, position = divmod(number, self.num_windows)
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(self.num_windows)}
        start = int(self._orders[epoch][position]) * WINDOW
        return self.stream[start : start + WINDOW + 1]


def held_out_batch(stream: np.ndarray, num_tokens: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Rows spread evenly over a held-out stream, int64 [rows, seq_len]; always the same ones."""
    rows = min(max(num_tokens // seq_len, 1), (len(stream) - 1) // seq_len)
    starts = np.linspace(0, len(stream) - 1 - seq_len, max(rows, 0)).astype(np.int64)
    picked = np.stack([stream[s : s + seq_len + 1] for s in starts]) if rows > 0 else np.zeros((0, seq_len + 1))
    tokens = torch.from_numpy(picked.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _sample_texts(documents: Sequence[Document], num_bytes: int, rng: random.Random) -> list[str]:
    texts, total = [], 0
    for document in rng.sample(documents, len(documents)):
        texts.append(document.text)
        total += document.num_bytes
        if total >= num_bytes:
            break
    return texts


def _encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document], label: str) -> list[np.ndarray]:
    """One uint16 array per document, end-of-text at its end."""
    arrays = []
    for start in tqdm(range(0, len(documents), 256), desc=label):
        texts = [d.text for d in documents[start : start + 256]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
            arrays.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
    return arrays
