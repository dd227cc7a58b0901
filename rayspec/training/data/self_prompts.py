"""Prompts that the target writes itself, so that any chat model can be trained for without a data set.

A model tuned on conversations, given its template up to the first message of the user, writes such a message (Magpie,
Xu et al. 2024, arXiv 2406.08464). What is unfinished, too short or long, degenerate or already there is left out.
A folder of JSONL files of conversations, one for each batch; a killed run goes on behind the last whole one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from rayspec.training.data.answers import WRITING_TEMPERATURE, Answerer, AnswersConfig, Request
from rayspec.training.data.chat import ChatTemplate
from sglang_ext.whole import write_whole

MIN_CHARS = 12
MAX_BATCHES_PER_WANTED = 4  # a target that writes fewer usable prompts than one in four is no chat model


def prompt_hash(text: str) -> str:
    """Of letters and digits alone, so that case, spaces and punctuation make no other prompt."""
    return hashlib.sha256(re.sub(r"\W+", "", text).casefold().encode()).hexdigest()[:16]


def is_sensible(text: str) -> bool:
    """Whether a message could be a person's: long enough, made of words, and no loop."""
    words = text.split()
    if len(text) < MIN_CHARS or len(words) < 3 or "<|" in text:
        return False
    return len(set(words)) / len(words) > 0.4 and sum(c.isalpha() for c in text) / len(text) > 0.5


def write_prompts(
    folder: Path, config: AnswersConfig, chat: ChatTemplate, answer: Answerer, avoid: Iterable[str] = ()
) -> list[str]:
    """`config.count` different messages in `folder`; `avoid`: hashes of prompts that must not be among them. Raises
    ValueError where the target does not write as many."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = set(avoid)
    found: list[str] = []
    batch = 0
    most_batches = MAX_BATCHES_PER_WANTED * config.num_shards
    with tqdm(total=config.count, desc=f"{folder.name}: prompts written by the target", unit="prompt") as bar:
        while len(found) < config.count:
            file = folder / f"prompts-{batch:05d}.jsonl"
            if not file.is_file():
                if batch == most_batches:
                    raise ValueError(
                        f"the target wrote {len(found)} usable prompts in {batch * config.batch_size}, too few for "
                        f"{config.count}; name a workload or a folder of texts with answers.prompts"
                    )
                texts = _new_prompts(config, chat, answer, seen)
                write_whole(file, "".join(json.dumps({"turns": [text]}, ensure_ascii=False) + "\n" for text in texts))
            texts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]
            seen |= {prompt_hash(text) for text in texts}
            found += texts
            bar.update(min(len(texts), config.count - bar.n))
            batch += 1
    return found[: config.count]


def _new_prompts(config: AnswersConfig, chat: ChatTemplate, answer: Answerer, seen: Iterable[str]) -> list[str]:
    openings = [config.openings[n % len(config.openings)] for n in range(config.batch_size)]
    requests = [
        Request(chat.encode(chat.opening + opening), WRITING_TEMPERATURE, config.max_prompt_tokens, (chat.user_stop,))
        for opening in openings
    ]
    messages = [chat.message(ids, opening) for ids, opening in zip(answer(requests), openings, strict=True)]
    return new_and_sensible(messages, seen)


def new_and_sensible(texts: Sequence[str | None], seen: Iterable[str]) -> list[str]:
    known, kept = set(seen), []
    for text in texts:
        if text is not None and is_sensible(text) and prompt_hash(text) not in known:
            known.add(prompt_hash(text))
            kept.append(text)
    return kept
