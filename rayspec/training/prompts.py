"""Prompts as token ids, cut from the corpus's training or held-out files, or from a folder of one's own."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rayspec.training import corpus
from rayspec.training.answers import AnswersConfig
from rayspec.training.corpus import Encoder
from rayspec.training.sources import CorpusConfig, Document, Package


def cut_prompt_ids(config: AnswersConfig, corpus_config: CorpusConfig, tokenizer: Encoder) -> list[list[int]]:
    """`config.count` prompts. Raises ValueError if the documents do not yield as many."""
    texts = corpus.cut_prompts(
        tokenizer,
        _documents(config.documents, corpus_config),
        config.count,
        (config.min_prompt_tokens, config.max_prompt_tokens),
        config.seed,
    )
    return [tokenizer.encode(text) for text in texts]


def _documents(source: str, corpus_config: CorpusConfig) -> list[Document]:
    if source == "training":
        return corpus.training_documents(corpus_config)
    if source == "held_out":
        return corpus.held_out_documents(corpus_config)
    files = sorted(file for file in Path(source).rglob("*") if file.is_file()) if Path(source).is_dir() else []
    if not files:
        raise ValueError(f"answers.documents must be training, held_out or a folder of text files, got {source!r}")
    package = Package(name=source, version="", licence="")
    contents = [(file, file.read_bytes()) for file in files]
    return [
        Document(
            package=package,
            name=file.name,
            sha256=hashlib.sha256(content).hexdigest(),
            num_bytes=len(content),
            path=file,
        )
        for file, content in contents
    ]
