"""Typed entries of the form {kind: ..., options}: which dataclass a kind is, and its checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

T = TypeVar("T")


def parse(kinds: Mapping[str, type[T]], entry: Mapping[str, Any], path: str) -> T:
    """The dataclass of `entry["kind"]` with the other entries as its fields; `path` is where the entry stands.

    Raises ValueError for an unknown kind or option, and for a missing or wrong value.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{path} must be a mapping, {{kind: ..., options}}, got {entry!r}")
    options = {str(name): value for name, value in entry.items()}
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{path}.kind must be one of {', '.join(kinds)}, got {kind!r}")
    cls = kinds[kind]
    try:
        value = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), options))
    except ConfigKeyError as error:
        known = ", ".join(field.name for field in fields(cls)) or "none"  # type: ignore[arg-type]
        raise ValueError(f"{path} of kind {kind!r} has no option {error.full_key!r}; its options: {known}") from error
    except OmegaConfBaseException as error:
        where = f".{error.full_key}" if error.full_key else ""
        raise ValueError(f"{path}{where}: {str(error.msg or error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{path}.{error}") from error
    assert isinstance(value, cls), "a structured config turns into its own dataclass"
    return value


def entry_of(kind: str, value: Any) -> dict[str, Any]:
    """The entry of a value, every default written out; inverse of `parse`."""
    return {"kind": kind, **asdict(value)}
