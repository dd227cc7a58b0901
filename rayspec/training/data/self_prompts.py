"""Prompts that the target writes itself, so that any chat model can be trained for without a data set.

A model tuned on conversations, given its template up to the first message of the user, writes such a message (Magpie,
Xu et al. 2024, arXiv 2406.08464). What is unfinished, too short or long, degenerate or already there is left out.
A folder of JSONL files of conversations, one for each batch; a killed run goes on behind the last whole one. Engines
write batches side by side: as many as it takes if every message is usable, then as many as are still missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from rayspec.training.data.answers import WRITING_TEMPERATURE, AnswersConfig
from rayspec.training.data.asking import Asking, Pool, Request, in_order, seed_of
from rayspec.training.data.chat import ChatTemplate
from rayspec.workloads.prompt_hashes import part_hashes, prompt_hash
from sglang_ext.whole import write_whole

MIN_CHARS = 12
MAX_BATCHES_PER_WANTED = 4  # a target that writes fewer usable prompts than one in four is no chat model


def is_sensible(text: str) -> bool:
    """Whether a message could be a person's: long enough, made of words, and no loop."""
    words = text.split()
    if len(text) < MIN_CHARS or len(words) < 3 or "<|" in text:
        return False
    return len(set(words)) / len(words) > 0.4 and sum(c.isalpha() for c in text) / len(text) > 0.5


def write_prompts(
    folder: Path, config: AnswersConfig, chat: ChatTemplate, pool: Pool, avoid: Iterable[str] = ()
) -> list[str]:
    """`config.count` different messages in `folder`; `avoid`: hashes of prompts that must not be among them. Raises
    ValueError where the target does not write as many."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = set(avoid)
    found: list[str] = []
    most_batches = MAX_BATCHES_PER_WANTED * config.num_shards
    batches = 0
    with tqdm(total=config.count, desc=f"{folder.name}: prompts written by the target", unit="prompt") as bar:

        def keep(texts: Sequence[str]) -> None:
            nonlocal batches
            seen.update(prompt_hash(text) for text in texts)
            found.extend(texts)
            batches += 1
            bar.update(min(len(texts), config.count - bar.n))

        while len(found) < config.count and _file(folder, batches).is_file():
            keep(_read(_file(folder, batches)))
        while len(found) < config.count:
            if batches >= most_batches:
                raise ValueError(
                    f"the target wrote {len(found)} usable prompts in {batches * config.batch_size}, too few for "
                    f"{config.count}; name a workload or a folder of texts with answers.prompts"
                )
            wanted = -(-(config.count - len(found)) // config.batch_size)
            numbers = range(batches, min(batches + wanted, most_batches))
            results = pool.run({n: partial(_new_messages, folder.name, n, config, chat) for n in numbers})
            for number, messages in in_order(results, numbers):
                texts = new_and_sensible(messages, seen)
                lines = [json.dumps({"turns": [text]}, ensure_ascii=False) + "\n" for text in texts]
                write_whole(_file(folder, number), "".join(lines))
                keep(texts)
    return found[: config.count]


def written_prompts(folder: Path, count: int) -> list[str]:
    """The first `count` messages in `folder`, or as many as are there. Raises ValueError for a damaged file."""
    found: list[str] = []
    batch = 0
    while len(found) < count and _file(folder, batch).is_file():
        found += _read(_file(folder, batch))
        batch += 1
    return found[:count]


def _file(folder: Path, batch: int) -> Path:
    return folder / f"prompts-{batch:05d}.jsonl"


def _read(file: Path) -> list[str]:
    try:
        turns = [json.loads(line)["turns"][0] for line in file.read_text().split("\n") if line]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{file} holds no prompts ({error!r}); delete it to have them written again") from error
    if not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{file} holds a prompt that is no text; delete it to have them written again")
    return turns


def _new_messages(purpose: str, batch: int, config: AnswersConfig, chat: ChatTemplate) -> Asking[list[str | None]]:
    """One batch, None for each message that did not end."""
    openings = [config.openings[n % len(config.openings)] for n in range(config.batch_size)]
    found = yield [
        Request(
            chat.encode(chat.opening + opening),
            WRITING_TEMPERATURE,
            config.max_prompt_tokens,
            (chat.user_stop,),
            seed_of(purpose, config.seed, batch * config.batch_size + n),
        )
        for n, opening in enumerate(openings)
    ]
    return [chat.message(ids, opening) for ids, opening in zip(found, openings, strict=True)]


def new_and_sensible(texts: Sequence[str | None], seen: Iterable[str]) -> list[str]:
    known, kept = set(seen), []
    for text in texts:
        if text is not None and is_sensible(text) and not part_hashes(text) & known:
            known.add(prompt_hash(text))
            kept.append(text)
    return kept
