"""Python source that every installation carries, split by content into training and held-out files.

sources.discover() → training_documents() / held_out_documents() → cut_prompt_records(). Which side a file is on depends
on nothing but its content, so two machines never disagree about a file they share.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayspec.training.data.sources import STDLIB, CorpusConfig, Document, discover

DEFINITION_SHARE = 0.8  # share of prompts that begin at a def or class; most other unindented lines are imports


class Encoder(Protocol):
    """What the prompt cutter needs of a tokenizer (a transformers fast tokenizer has it)."""

    def encode(self, text: str) -> list[int]: ...


def training_documents(config: CorpusConfig, documents: Sequence[Document] | None = None) -> list[Document]:
    """Files to train on: not held out, each package up to its cap."""
    documents = discover(config) if documents is None else documents
    kept = [d for d in documents if not d.is_held_out(config.held_out_percent)]
    return _capped(kept, config.package_cap_bytes)


def held_out_documents(config: CorpusConfig, documents: Sequence[Document] | None = None) -> list[Document]:
    """Files never trained on, each package up to its cap."""
    documents = discover(config) if documents is None else documents
    kept = [d for d in documents if d.is_held_out(config.held_out_percent)]
    return _capped(kept, config.held_out_cap_bytes)


CORPUS = {"training": training_documents, "held_out": held_out_documents}  # as settings name its two sides


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The opening of a piece of code. `text` ends with a line's last character, before its newline."""

    text: str
    document: Document


def cut_prompt_records(
    tokenizer: Encoder,
    documents: Sequence[Document],
    count: int,
    prompt_tokens: tuple[int, int],
    seed: int,
    is_allowed: Callable[[str], bool] = lambda text: True,
) -> list[Prompt]:
    """Cut `count` prompts of `prompt_tokens` = (fewest, most) tokens, spread evenly over packages, none twice, of texts
    that `is_allowed` takes.

    A prompt starts at an unindented statement and stops at the end of a line *without* the newline: the tokenizer
    merges a newline with the indentation after it, so a trailing newline would be a token that source never has.
    """
    fewest, most = prompt_tokens
    if not 1 <= fewest <= most:
        raise ValueError(f"prompt_tokens must be (fewest, most) with 1 <= fewest <= most, got {prompt_tokens}")
    rng = random.Random(seed)
    by_package: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_package[document.package.name].append(document)
    queues = [rng.sample(by_package[name], len(by_package[name])) for name in sorted(by_package)]
    prompts: dict[tuple[str, int], Prompt] = {}  # by file and first line: no two prompts share their opening
    failures = 0
    while queues and len(prompts) < count and failures < 20 * count:
        for queue in queues:
            document = queue.pop(0)
            queue.append(document)  # come round again, at another line
            start, text = _cut(tokenizer, document.text, rng.randint(fewest, most), fewest, rng)
            if text is None or (document.sha256, start) in prompts or not is_allowed(text):
                failures += 1
            elif len(prompts) < count:
                prompts[document.sha256, start] = Prompt(text=text, document=document)
    if len(prompts) < count:
        raise ValueError(
            f"only {len(prompts)} of {count} prompts of {prompt_tokens} tokens in {len(documents)} documents"
        )
    return list(prompts.values())


def _capped(documents: Iterable[Document], cap_bytes: int) -> list[Document]:
    """Documents in the given order, dropping those that would take a package over the cap."""
    used: dict[str, int] = defaultdict(int)
    kept = []
    for document in documents:
        package = document.package.name
        if package == STDLIB or used[package] + document.num_bytes <= cap_bytes:
            used[package] += document.num_bytes
            kept.append(document)
    return kept


def _cut(tokenizer: Encoder, text: str, most: int, fewest: int, rng: random.Random) -> tuple[int, str | None]:
    """(first line, text) of the longest piece of whole lines within the bounds, or None for the text."""
    lines = text.rstrip().split("\n")
    starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_@]", line)]
    definitions = [i for i in starts if re.match(r"@|def |class |async def ", lines[i])]
    if definitions and rng.random() < DEFINITION_SHARE:
        starts = definitions
    if not starts:
        return 0, None
    start = rng.choice(starts)
    best = None
    for end in range(start + 1, len(lines)):  # the last line stays out: something must be left to predict
        piece = "\n".join(lines[start:end]).rstrip()
        length = len(tokenizer.encode(piece))
        if length > most:
            break
        best = piece if length >= fewest else None
    return start, best
