"""Prompts to measure with: named sets or any JSONL file, as `name:count`, `path:count` or `name:path:count`.

One record per line, as its publisher wrote it: `turns` (MT-Bench, Spec-Bench, our own), `prompt` (HumanEval),
`question` (GSM8K), `conversations` ([{role, content}]), or `text`. A `.gz` file is read as it is.
"""

import gzip
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayspec.shipped import ASSETS

logger = logging.getLogger(__name__)

DATA_VARIABLE = "RAYSPEC_DATA"
# name -> (file under $RAYSPEC_DATA, where it comes from)
PUBLISHED: dict[str, tuple[str, str]] = {
    "humaneval": ("humaneval/HumanEval.jsonl.gz", "https://github.com/openai/human-eval"),
    "mt_bench": ("mt_bench/question.jsonl", "https://huggingface.co/spaces/lmsys/mt-bench"),
    "spec_bench": ("spec_bench/question.jsonl", "https://github.com/hemingkx/Spec-Bench"),
    "gsm8k": ("gsm8k/test.jsonl", "https://github.com/openai/grade-school-math"),
}
SHIPPED: dict[str, Path] = {
    name: ASSETS / "prompts" / f"{name}.jsonl" for name in ("heldout_python", "mixed_languages")
}


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request's text. `id` is unique in its workload; acceptance is also reported per `category`."""

    id: str
    category: str
    text: str


def load_workload(spec: str, seed: int = 0) -> list[Prompt]:
    """The prompts of a workload, shuffled by `seed`. Raises ValueError, saying what to do.

    The same seed gives the same order, so `:16` is the beginning of `:32`.
    """
    name, count = _split(spec)
    file = _file(name)
    prompts = [_prompt(record, file, line) for line, record in _records(file)]
    ids = {p.id for p in prompts}
    if len(ids) < len(prompts):
        raise ValueError(f"workload {file}: {len(prompts) - len(ids)} records repeat an id that another one has")
    random.Random(seed).shuffle(prompts)
    if count is not None and count > len(prompts):
        raise ValueError(f"workload {spec!r} asks for {count} prompts, but {file} holds {len(prompts)}")
    return prompts[:count]


def _split(spec: str) -> tuple[str, int | None]:
    known, _, rest = spec.partition(":")
    if known in PUBLISHED and rest and not rest.isdigit():
        spec = rest  # humaneval:/path/to/file:count
    name, colon, count = spec.rpartition(":")
    if not colon:
        return spec, None
    if not count.isdigit():
        return spec, None  # a colon that belongs to the path
    if int(count) < 1:
        raise ValueError(f"workload {spec!r}: the count after the colon must be at least 1")
    return name, int(count)


def _file(name: str) -> Path:
    if name in SHIPPED:
        if not SHIPPED[name].is_file():
            raise ValueError(
                f"workload {name!r}: the shipped file {SHIPPED[name]} is missing; install the package anew"
            )
        return SHIPPED[name]
    if name in PUBLISHED:
        return _published_file(name)
    path = Path(name).expanduser()
    if not path.is_file():
        known = ", ".join([*SHIPPED, *PUBLISHED])
        raise ValueError(f"no workload {name!r}: neither a known name ({known}) nor a file here")
    return path


def _published_file(name: str) -> Path:
    relative, source = PUBLISHED[name]
    root = os.environ.get(DATA_VARIABLE)
    if root and (Path(root) / relative).is_file():
        return Path(root) / relative
    state = f"{DATA_VARIABLE} is {root}, without that file" if root else f"{DATA_VARIABLE} is not set"
    raise ValueError(
        f"workload {name!r} is read from ${DATA_VARIABLE}/{relative}, and {state}. Nothing is downloaded: get it from "
        f"{source} and set {DATA_VARIABLE}, or give the file's own path (workload=/path/to/{Path(relative).name}:32)"
    )


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    opener = gzip.open if file.suffix == ".gz" else open
    found = False
    try:
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"{file}:{number}: expected a JSON object, got {type(record).__name__}")
                found = True
                yield number, record
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{number}: no valid JSON ({error})") from error
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read as text: {error}") from error
    if not found:
        raise ValueError(f"workload {file} holds no record")


def _prompt(record: dict[str, Any], file: Path, line: int) -> Prompt:
    text = _first_turn(record, file, line)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{file}:{line}: the prompt must be text that is not empty, got {text!r}")
    id_ = next((record[key] for key in ("question_id", "task_id", "id") if key in record), line)
    return Prompt(id=str(id_), category=str(record.get("category", file.name.split(".")[0])), text=text)


def _first_turn(record: dict[str, Any], file: Path, line: int) -> Any:
    if "turns" in record:
        turns = record["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"{file}:{line}: turns must be a list of at least one text, got {turns!r}")
        if len(turns) > 1:
            _warn_later_turns(file)
        return turns[0]
    if "conversations" in record:
        return _first_user_message(record["conversations"], file, line)
    for key in ("prompt", "question", "text"):
        if key in record:
            return record[key]
    known = "turns, conversations, prompt, question, text"
    raise ValueError(f"{file}:{line}: no prompt in the record; expected one of {known}, got {', '.join(record)}")


def _first_user_message(messages: Any, file: Path, line: int) -> Any:
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages
    ):
        raise ValueError(f"{file}:{line}: conversations must be a list of {{role, content}}, got {messages!r}")
    asked = [m["content"] for m in messages if m["role"] == "user"]
    if not asked:
        raise ValueError(f"{file}:{line}: the conversation has no message of role 'user'")
    if len(asked) > 1:
        _warn_later_turns(file)
    return asked[0]


_warned: set[Path] = set()


def _warn_later_turns(file: Path) -> None:
    if file not in _warned:
        _warned.add(file)
        logger.warning("workload %s has conversations of several turns; only the first turn is sent", file)
