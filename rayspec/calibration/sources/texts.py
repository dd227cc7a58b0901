"""Raw text to count: the training corpus's documents, a folder of text files, or a JSONL file with a `text` a line."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from tokenizers import Tokenizer

from rayspec.calibration.counting import pair_ids, partial_counts
from rayspec.training.data.corpus import CORPUS
from rayspec.training.data.sources import CorpusConfig, Document
from sglang_ext.json_text import parse_json

BATCH = 64  # documents tokenised together
Batch = dict[str, np.ndarray]


@lru_cache(maxsize=2)
def corpus_documents(side: str, corpus: CorpusConfig) -> tuple[Document, ...]:
    """The corpus takes seconds to list, and is asked for twice."""
    return tuple(CORPUS[side](corpus))


def describe_texts(documents: str, corpus: CorpusConfig) -> dict[str, Any]:
    """Name, number and fingerprint of the documents. Raises ValueError for what cannot be read as text."""
    if documents in CORPUS:
        found = corpus_documents(documents, corpus)
        return {"documents": documents, "files": len(found), "sha256": _sha256(d.sha256.encode() for d in found)}
    path = Path(documents)
    if os.path.isdir(path):
        files = _text_files(path)
        return {"documents": path.name, "files": len(files), "sha256": _sha256(map(_checked_text, files))}
    if path.name.endswith((".jsonl", ".jsonl.gz")) and os.path.isfile(path):
        _check_first_line(path)
        with path.open("rb") as handle:
            return {"documents": path.name, "files": 1, "sha256": hashlib.file_digest(handle, "sha256").hexdigest()}
    raise ValueError(
        f"sources.*.documents must be {', '.join(CORPUS)}, a folder of text files or a .jsonl file with a text on each "
        f"line, got {documents!r}"
    )


def text_counts(documents: str, corpus: CorpusConfig, count: Callable[[Batch], Batch], blocks: int) -> ray.data.Dataset:
    """Partial counts of the documents by `count`. Paths must exist on every node of the cluster."""
    path = Path(documents)
    if documents in CORPUS:
        texts = [d.text for d in corpus_documents(documents, corpus)]
        dataset = ray.data.from_arrow([pa.table({"text": part}) for part in _split(texts, blocks)])
    elif path.is_dir():
        files = [str(file) for file in _text_files(path)]
        dataset = ray.data.read_binary_files(files, override_num_blocks=min(blocks, len(files)))
    else:
        dataset = ray.data.read_json(str(path), override_num_blocks=blocks).select_columns(["text"])
    return dataset.map_batches(count, batch_size=BATCH, batch_format="numpy")


def counter_of(tokenizer: Tokenizer) -> Callable[[Batch], Batch]:
    """What turns a batch of documents (`text`, or `bytes` in UTF-8) into partial counts of their tokens.

    No token is added, so documents are not separated by a stop token.
    """

    def count(batch: Batch) -> Batch:
        return partial_counts(np.concatenate(_documents(batch, tokenizer)))

    return count


def pair_counter_of(tokenizer: Tokenizer) -> Callable[[Batch], Batch]:
    """Like `counter_of`, for neighbouring pairs; none goes from one document to the next."""

    def count(batch: Batch) -> Batch:
        return partial_counts(np.concatenate([pair_ids(ids[:-1], ids[1:]) for ids in _documents(batch, tokenizer)]))

    return count


def _documents(batch: Batch, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids int64 of each document."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a task; Ray starts as many as there are
    texts = [b.decode() for b in batch["bytes"]] if "bytes" in batch else list(batch["text"])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("sources.*.documents: a line of the JSONL file has no text; give each one {'text': '...'}")
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.asarray(e.ids, dtype=np.int64) for e in encodings]


def _text_files(folder: Path) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise ValueError(f"sources.*.documents={folder} holds no file")
    return files


def _checked_text(file: Path) -> bytes:
    content = file.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"sources.*.documents: {file} is no UTF-8 text ({error}); remove it from the folder"
        ) from error
    return hashlib.sha256(content).hexdigest().encode()


def _check_first_line(file: Path) -> None:
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rb") as lines:
            first = next(iter(lines), b"")
        is_text = isinstance(parse_json(first)["text"], str)
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        raise ValueError(f"sources.*.documents: {file} cannot be read ({error})") from error
    except (ValueError, TypeError, KeyError):
        is_text = False
    if not is_text:
        raise ValueError(f'sources.*.documents: every line of {file} must be a JSON object such as {{"text": "..."}}')


def _sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _split(items: list[str], parts: int) -> list[list[str]]:
    """Every `parts`-th item: big and small documents spread evenly."""
    return [part for i in range(parts) if (part := items[i::parts])]
