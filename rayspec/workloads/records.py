"""One line of a prompts file, or row of a parquet file, as a Conversation. What is wrong is said with file and number.

| record | becomes |
|---|---|
| `{"turns": ["...", "..."]}` (MT-Bench, Spec-Bench, our own) | a turn each |
| `{"prompt": "..."}` (HumanEval), `{"question": "..."}` (GSM8K) | one turn |
| `{"messages": [{"role", "content"}]}` or `{"conversations": [...]}` | a turn for each message of `user` |
| `{"text": "..."}` | one turn that is never put into a chat template |

A message of `system` comes first. Recorded answers of `assistant` are kept for training on them as they are
(`answers.as_given`); wherever else a conversation is used, the target gives its own.
`question_id`, `task_id` or `id` names the record (else its number in the file), `category` its category.
"""

import gzip
import unicodedata
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayspec.messages import quoted
from sglang_ext.json_text import parse_json

ID_KEYS = ("question_id", "task_id", "id")
MAX_ID = 200  # characters
FORMS = ("turns", "messages", "conversations", "prompt", "question", "text")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What one user says in turn, each turn after the target's answer to the one before.

    `id` is unique in its workload; acceptance is also reported per `category`. `is_chat` False is raw text to continue.
    `answers`: recorded ones of the first turns, up to a turn that has none or several; what asks a target has no use
    for them, so that they are no part of what a conversation is compared by.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    is_chat: bool = True
    answers: tuple[str, ...] = field(default=(), compare=False, repr=False)


class _Malformed(Exception):
    """What is wrong with a record; the reader adds where."""


def read_file(file: Path, category: str) -> list[Conversation]:
    """The records of a JSONL file, `.gz` or not, or of a `.parquet` file; `category` is that of records without one.
    Raises ValueError."""
    records = _parquet_rows(file) if file.suffix == ".parquet" else read_json_lines(file)
    return read_records(records, str(file), category)


def read_records(records: Iterator[tuple[int, Any]], source: str, category: str) -> list[Conversation]:
    """Conversations of (number, record) pairs from `source`. Raises ValueError naming source, number and reason."""
    found: list[Conversation] = []
    number_of: dict[str, int] = {}
    for number, record in records:
        try:
            conversation = _conversation(record, number, category)
            if conversation.id in number_of:
                raise _Malformed(f"repeats the id {conversation.id!r} of line {number_of[conversation.id]}")
        except _Malformed as error:
            raise ValueError(f"{source}:{number}: {error}") from None
        number_of[conversation.id] = number
        found.append(conversation)
    if not found:
        raise ValueError(f"workload {source} holds no record")
    return found


def read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    opener = gzip.open if file.suffix == ".gz" else open
    number = 0
    try:
        with opener(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, parse_json(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}:{number}: no UTF-8 text ({error})") from error
    except ValueError as error:
        raise ValueError(f"{file}:{number}: no valid JSON ({error})") from error
    except (OSError, EOFError, zlib.error) as error:  # gzip raises all three
        raise ValueError(f"{file}:{number + 1}: cannot be read ({error})") from error


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import pandas as pd  # a second

    try:
        frame = pd.read_parquet(file)
    except (OSError, ValueError) as error:  # whatever pyarrow raises is one of the two
        raise ValueError(f"{file}: no parquet file that can be read ({error})") from error
    for number, row in enumerate(frame.to_dict("records"), start=1):
        # a column of lists comes as arrays
        yield number, {str(key): v.tolist() if hasattr(v, "tolist") else v for key, v in row.items()}


def _conversation(record: Any, number: int, category: str) -> Conversation:
    if not isinstance(record, dict):
        raise _Malformed(f"expected a JSON object, got {type(record).__name__}; one record per line")
    form = next((key for key in FORMS if key in record), None)
    if form is None:
        raise _Malformed(f"no prompt in the record; expected one of {', '.join(FORMS)}, got {quoted(list(record))}")
    system: str | None = None
    answers: tuple[str, ...] = ()
    if form in ("messages", "conversations"):
        system, turns = _from_messages(record[form], form)
        answers = _recorded_answers(record[form])
    elif form == "turns":
        if not isinstance(record[form], list) or not record[form]:
            raise _Malformed(f"turns must be a list of at least one text, got {quoted(record[form])}")
        turns = record[form]
    else:
        turns = [record[form]]
    for turn in turns:
        _check_text(turn, form)
    id_ = next((record[key] for key in ID_KEYS if key in record), number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        raise _Malformed(f"the id must be text or a whole number, got {quoted(id_)}")
    if not 1 <= len(str(id_)) <= MAX_ID or not str(id_).isprintable():
        raise _Malformed(f"the id must be 1 to {MAX_ID} printable characters, got {quoted(id_)}")
    _check_unicode(str(id_), "the id")
    own_category = record.get("category", category)
    if not isinstance(own_category, str) or not own_category.strip():
        raise _Malformed(f"category must be text that is not empty, got {quoted(own_category)}")
    _check_unicode(own_category, "category")
    if any(unicodedata.category(c) == "Cc" for c in own_category):
        raise _Malformed(f"category must be one line without control characters, got {quoted(own_category)}")
    is_chat = form != "text"
    return Conversation(
        id=str(id_), category=own_category, turns=tuple(turns), system=system, is_chat=is_chat, answers=answers
    )


def _from_messages(messages: Any, form: str) -> tuple[str | None, list[Any]]:
    """(system message or None, user messages)."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise _Malformed(f"{form} must be a list of {{role, content}}, got {quoted(messages)}")
    system, turns = None, []
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user":
            turns.append(content)
        elif role == "system" and i == 0:
            _check_text(content, form)
            system = content
        elif role != "assistant" or not turns:
            allowed = "user, assistant after a user, or system as the first"
            raise _Malformed(f"{form}[{i}].role must be {allowed}, got {role!r}")
    if not turns:
        raise _Malformed("the conversation has no message of role 'user'")
    return system, turns


def _recorded_answers(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    """Those of messages that `_from_messages` has taken."""
    by_turn: list[list[Any]] = []
    for message in messages:
        if message["role"] == "user":
            by_turn.append([])
        elif message["role"] == "assistant":
            by_turn[-1].append(message["content"])
    usable = [len(own) == 1 and _is_text(own[0]) for own in by_turn]
    return tuple(own[0] for own in by_turn[: [*usable, False].index(False)])


def _is_text(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value.strip()) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def _check_text(text: Any, form: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise _Malformed(f"{form}: the prompt must be text that is not empty, got {quoted(text)}")
    _check_unicode(text, f"{form}: the prompt")


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise _Malformed(f"{what} is no valid Unicode ({error.reason})") from None
