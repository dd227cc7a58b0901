"""What the config's `workload` asks for: `source[:count[:category]]`, several of them separated by commas.

A source is a name (`mt_bench`), a file (`/data/prompts.jsonl`), or a name with its file (`gsm8k:/data/test.jsonl`).
Without a count it is all of it (`spec_bench::rag` is all of one category).
"""

import os
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from rayspec.shipped import user_path
from rayspec.workloads.published import is_name, load_named, names
from rayspec.workloads.records import Conversation, read_file

_COUNTS = re.compile(r"(?P<source>.*?)(?::(?P<count>\d*)(?::(?P<category>[^:/]+))?)?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """One part of a workload. `name` and `path`: at least one of them."""

    text: str  # as it was written
    name: str | None
    path: Path | None
    count: int | None
    category: str | None

    def load(self, seed: int) -> list[Conversation]:
        """Its conversations, shuffled by `seed`. Raises ValueError.

        The same seed gives the same order, so that `:16` is the beginning of `:32`.
        """
        if self.name is not None:
            found = load_named(self.name, self.path)
        else:
            assert self.path is not None, "a selection has a name or a path"
            found = read_file(self.path, self.path.name.split(".")[0])
        if self.category is not None:
            known = sorted({c.category for c in found})
            found = [c for c in found if c.category == self.category]
            if not found:
                raise ValueError(
                    f"workload {self.text!r}: no category {self.category!r}; there are {', '.join(known[:20])}"
                )
        if self.count is not None and self.count > len(found):
            raise ValueError(f"workload {self.text!r} asks for {self.count} prompts, but there are {len(found)}")
        random.Random(seed).shuffle(found)
        return found[: self.count]


def load_workload(spec: str, seed: int = 0) -> list[Conversation]:
    """The conversations of a workload in an order that `seed` fixes. Raises ValueError, saying what to do.

    The parts of a mixed workload are shuffled together, and their ids begin with the part's source.
    """
    parts = [parse_selection(text.strip()) for text in spec.split(",")]
    if len(parts) == 1:
        return parts[0].load(seed)
    mixed = [replace(c, id=f"{part.name or part.path}/{c.id}") for part in parts for c in part.load(seed)]
    twice = [id_ for id_, n in Counter(c.id for c in mixed).items() if n > 1]
    if twice:
        raise ValueError(f"workload {spec!r} takes {twice[0]} and {len(twice) - 1} others more than once")
    random.Random(seed).shuffle(mixed)
    return mixed


def parse_selection(text: str) -> Selection:
    """Read `source[:count[:category]]`. Raises ValueError for a source that is neither a known name nor a file."""
    first, _, rest = text.partition(":")
    name = first if is_name(first) else None
    if name is None and os.path.isfile(user_path(text, "workload")):  # a colon can belong to a path
        return Selection(text=text, name=None, path=user_path(text, "workload"), count=None, category=None)
    match = _COUNTS.fullmatch(text if name is None else (rest if _is_path(rest) else text))
    assert match is not None, "every part of the pattern is optional"
    source, count, category = match["source"], match["count"], match["category"]
    path = None if source == name else user_path(source, "workload")
    if path is not None and not os.path.isfile(path):
        raise ValueError(
            f"no workload {text!r}: {source!r} is neither a known name ({', '.join(names())}) nor a file here; "
            "expected name:count:category or path:count:category, several separated by commas"
        )
    if count and not 1 <= len(count) <= 9:
        raise ValueError(f"workload {text[:80]!r}: the count after the colon has {len(count)} digits; at most 9")
    if count and int(count) < 1:
        raise ValueError(f"workload {text!r}: the count after the colon must be at least 1")
    return Selection(text=text, name=name, path=path, count=int(count) if count else None, category=category)


def _is_path(rest: str) -> bool:
    """Whether what follows a name is a file rather than `count[:category]`."""
    return bool(rest) and re.fullmatch(r"\d*(:[^:/]+)?", rest) is None
