"""Typed entries of the form {kind: ..., options}: which dataclass a kind is, and its checked value."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from sglang_ext.settings import build, kind_and_options

T = TypeVar("T")


def parse(kinds: Mapping[str, type[T]], entry: Mapping[str, Any], path: str) -> T:
    """The dataclass of `entry["kind"]` with the other entries as its fields; `path` is where the entry stands.

    Raises ValueError for an unknown kind or option, and for a missing or wrong value.
    """
    kind, options = kind_and_options(entry, kinds, path)
    return build(kinds[kind], options, path)


def entry_of(kind: str, value: Any) -> dict[str, Any]:
    """The entry of a value, every default written out; inverse of `parse`."""
    return {"kind": kind, **asdict(value)}
