"""Where prompts come from: written by the target, a workload of conversations, or pieces cut from text files.

Prompts to train on and prompts to measure with are different ones, told by the hash of their text: the held-out set is
made first, and neither it nor any evaluation set is trained on.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rayspec.training.data.answers import AnswersConfig, Prompt
from rayspec.training.data.asking import Pool
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.corpus import CORPUS, Encoder, cut_prompt_records
from rayspec.training.data.self_prompts import write_prompts
from rayspec.training.data.sources import CorpusConfig, Document, Package
from rayspec.workloads import load_workload
from rayspec.workloads.prompt_hashes import part_hashes
from rayspec.workloads.published import EVALUATION_ONLY, evaluation_sets
from rayspec.workloads.selection import parse_selection

SELF = "self"
LONG_OPENING = 5  # words; with fewer, prompts of all kinds begin alike


def is_text(source: str) -> bool:
    """Whether prompts are cut from text instead of being messages of a chat."""
    return source in CORPUS or os.path.isdir(source)


def check_source(config: AnswersConfig, name: str) -> None:
    """Raise ValueError for a source that does not exist or is for evaluation alone."""
    if config.as_given and is_text(config.prompts):
        raise ValueError(
            f"{name}.as_given takes conversations with their answers, but {name}.prompts={config.prompts} is text; "
            "name a file of conversations, or leave as_given out, so that the target continues the text"
        )
    if config.prompts == SELF:
        return _check_openings(config, name)
    if is_text(config.prompts):
        return
    try:
        parts = [parse_selection(part.strip()) for part in config.prompts.split(",")]
    except ValueError as error:
        raise ValueError(
            f"{name}.prompts must be {SELF}, a workload, a folder of text files, {' or '.join(CORPUS)}: {error}"
        ) from error
    forbidden = sorted({part.name for part in parts if part.name is not None} & EVALUATION_ONLY)
    if forbidden:
        raise ValueError(
            f"{name}.prompts={config.prompts}: {forbidden[0]} is for evaluation, and a drafter trained on it would be "
            f"measured on what it has seen; use {SELF}, or conversations of your own"
        )
    if config.as_given and not any(c.answers for c in load_workload(config.prompts, config.seed)):
        raise ValueError(
            f"{name}.as_given takes conversations with their answers, but no record of {name}.prompts={config.prompts} "
            "has an answer: in `messages` or `conversations`, the one message of `assistant` after a message of "
            "`user`; leave as_given out, so that the target answers"
        )


def _check_openings(config: AnswersConfig, name: str) -> None:
    openings = {tuple(words): opening for opening in config.openings if len(words := _words(opening)) >= LONG_OPENING}
    if not openings:
        return
    longest = max(len(opening) for opening in openings.values())
    for conversation in (c for found in evaluation_sets() for c in found):
        for turn in conversation.turns:
            begins = tuple(_words(turn[: 2 * longest]))  # of a long prompt the beginning is enough
            for begin, opening in openings.items():
                both = min(len(begin), len(begins))
                if both >= LONG_OPENING and begin[:both] == begins[:both]:
                    raise ValueError(
                        f"{name}.openings has {opening!r}, and {conversation.id} of an evaluation set begins so "
                        f"({turn[:60]!r}); a drafter trained on it would be measured on what it has seen; change it"
                    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def given_prompts(
    config: AnswersConfig,
    name: str,
    corpus_config: CorpusConfig,
    tokenizer: Encoder,
    chat: ChatTemplate | None,
    avoid: Iterable[str] = (),
) -> list[Prompt]:
    """`config.count` prompts of a source that is there already, none of whose hashes is in `avoid`. Raises ValueError
    where there are not as many."""
    if is_text(config.prompts):
        return _cut(config, corpus_config, tokenizer, set(avoid))
    return _of_workload(config, name, _needed(chat, config, name), set(avoid))


def own_prompts(
    config: AnswersConfig, name: str, folder: Path, chat: ChatTemplate | None, pool: Pool, avoid: Iterable[str] = ()
) -> list[Prompt]:
    """As many prompts that the target has written into `folder`, or writes now. Raises ValueError where it cannot."""
    chat = _needed(chat, config, name)
    return [Prompt(text, chat.first_turn(text)) for text in write_prompts(folder, config, chat, pool, avoid)]


def _needed(chat: ChatTemplate | None, config: AnswersConfig, name: str) -> ChatTemplate:
    if chat is None:
        raise ValueError(
            f"{name}.prompts={config.prompts} are messages of a chat, but the target's tokenizer has no chat template; "
            "name a folder of text files, whose beginnings the target continues"
        )
    return chat


def _of_workload(config: AnswersConfig, name: str, chat: ChatTemplate, avoid: set[str]) -> list[Prompt]:
    prompts: list[Prompt] = []
    left_out: list[str] = []
    for conversation in load_workload(config.prompts, config.seed):
        if len(prompts) == config.count:
            break
        ids = chat.first_turn(conversation.turns[0])
        fits = config.min_prompt_tokens <= len(ids) <= config.max_prompt_tokens
        if config.as_given:  # an answer that was given under a message of `system` is none without it
            fits = fits and bool(conversation.answers) and conversation.system is None
        if fits and any(part_hashes(turn) & avoid for turn in conversation.turns):
            left_out.append(conversation.id)
        elif fits:
            prompts.append(Prompt(conversation.turns[0], ids, conversation.turns[1:], conversation.answers))
    if left_out:
        print(
            f"{name}.prompts={config.prompts}: {len(left_out)} conversation(s) are left out, since a turn of theirs is "
            f"evaluated or in another set of this training; the first is {left_out[0]}"
        )
    if len(prompts) < config.count:
        given = " with an answer and without a message of `system`" if config.as_given else ""
        raise ValueError(
            f"{name}.prompts={config.prompts} holds {len(prompts)} prompts of {config.min_prompt_tokens} to "
            f"{config.max_prompt_tokens} tokens{given} that are in no other set, not {name}.count={config.count}; "
            "lower the count, or raise max_prompt_tokens"
        )
    return prompts


def _cut(config: AnswersConfig, corpus_config: CorpusConfig, tokenizer: Encoder, avoid: set[str]) -> list[Prompt]:
    pieces = cut_prompt_records(
        tokenizer,
        _documents(config.prompts, corpus_config),
        config.count,
        (config.min_prompt_tokens, config.max_prompt_tokens),
        config.seed,
        lambda text: not part_hashes(text) & avoid,
    )
    return [Prompt(piece.text, tokenizer.encode(piece.text)) for piece in pieces]


def _check_is_text(source: str, file: Path, content: bytes) -> None:
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"answers.prompts={source} holds {file.relative_to(source)}, which is no text in UTF-8 ({error.reason} at "
            f"byte {error.start}); take it out of the folder, or write it as UTF-8"
        ) from None


def _documents(source: str, corpus_config: CorpusConfig) -> Sequence[Document]:
    if source in CORPUS:
        return CORPUS[source](corpus_config)
    files = sorted(file for file in Path(source).rglob("*") if file.is_file())
    if not files:
        raise ValueError(f"answers.prompts={source} is a folder without files; put text files there")
    package = Package(name=source, version="", licence="")
    contents = [(file, file.read_bytes()) for file in files]
    for file, content in contents:
        _check_is_text(source, file, content)
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
