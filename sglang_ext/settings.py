"""Builds dataclasses from what YAML, JSON and the command line say: checked by pydantic, refused in plain words."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]
# by the beginning of pydantic's name of an error
ALLOWED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list, [a, b]",
    "tuple": "a list, [a, b]",
    "dict": "a mapping, {key: value}",
    "dataclass": "a mapping, {key: value}",
}


class Settings:
    """Base of the dataclasses that `build` makes; built in Python, they are dataclasses like any other."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


def build(cls: type[T], values: Mapping[str, Any], path: str = "", *, given: Mapping[str, Any] | None = None) -> T:
    """The dataclass `cls` of `values`, nested dataclasses included. Nothing is converted but a whole number where a
    number is asked for.

    Args:
        path: where the values stand, for messages.
        given: fields that are known from elsewhere, which `values` cannot set.

    Raises ValueError, naming the setting, for an unknown key, a missing value, a value of another type, a number
    that is not finite, and for whatever the dataclasses themselves refuse.
    """
    given = given or {}
    taken = sorted(set(values) & set(given))
    if taken:
        raise ValueError(_unknown_key(cls, (taken[0],), path, given))
    try:
        text = json.dumps({**values, **given})
    except (TypeError, RecursionError) as error:
        raise ValueError(f"{path or cls.__name__} holds what is no setting ({error})") from error
    try:
        return _adapter(cls).validate_json(text, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        found = error.errors()
        # a mistyped key is also a missing value; its name says more
        first = next((e for e in found if e["type"] == "unexpected_keyword_argument"), found[0])
        raise ValueError(_message(cls, first, path, given)) from error


def kind_and_options(entry: Any, known: Collection[str], path: str) -> tuple[str, dict[str, Any]]:
    """Both of an entry {kind: ..., options}. Raises ValueError for what is none, and for an unknown kind."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{path} must be a mapping, {{kind: ..., options}}, got {entry!r}")
    options = {str(name): value for name, value in entry.items()}
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{path}.kind must be one of {', '.join(known)}, got {kind!r}")
    return kind, options


def one_of(allowed: Sequence[Any], *, or_absent: bool = False) -> AfterValidator:
    """Of the type of a field: it takes these values alone."""

    def check(value: Any) -> Any:
        names = ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in allowed)
        if value not in allowed:
            raise ValueError(f"must be one of {names}{', or absent' if or_absent else ''}, got {value!r}")
        return value

    return AfterValidator(check)


def require(is_valid: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError, naming the setting and what is `allowed`, unless its value is valid."""
    if not is_valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_type(name: str, value: Any, wanted: Any) -> None:
    """Raise ValueError for a single value that is not of a type (int, float, bool, str, or a field's), as `build`
    does."""
    try:
        TypeAdapter(wanted, config=Settings.__pydantic_config__).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        is_said = first["type"] == "value_error"
        said = first["ctx"]["error"] if is_said else f"must be {_allowed(first)}, got {first['input']!r}"
        place = "".join(f"[{step}]" for step in first["loc"] if isinstance(step, int))
        raise ValueError(f"{name}{place} {said}") from error


def unknown_key(name: int | str, path: str, known: Iterable[str]) -> str:
    """What is said of a key that is none of those known under `path`."""
    where = f"{path}.{name}" if path else str(name)
    return f"unknown key {where!r}; known{f' under {path}' if path else ''}: {', '.join(known) or 'none'}"


def _allowed(error: ErrorDetails) -> str:
    if error["type"] == "greater_than_equal":
        return f"at least {error['ctx']['ge']}"
    if error["type"] == "too_short":
        return f"a list of {error['ctx']['min_length']} or more"
    return ALLOWED.get(error["type"].split("_")[0], error["msg"])


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _message(cls: type, error: ErrorDetails, path: str, given: Mapping[str, Any]) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return _unknown_key(cls, error["loc"], path, given)
    if error["type"] == "value_error":  # raised by a dataclass, which may not know where it stands
        said, (where, _) = str(error["ctx"]["error"]), _found(cls, error["loc"], path)
        field = where.rpartition(".")[2]
        if where in said:
            return said
        if said.startswith("must "):  # raised by `one_of`
            return f"{where} {said}"
        name = field.partition("[")[0]  # of one entry of a list, the list's
        is_named = re.match(rf"{re.escape(name)}(?![\w\[])|unknown ", said)
        if name != where and is_named:  # raised by a parser that knows its name alone
            return said.replace(name, where, 1).replace(f"known under {name}", f"known under {where}")
        return said if said.startswith(where.partition("[")[0]) else f"{where}.{said}"
    where, _ = _found(cls, error["loc"], path)
    if error["type"] == "missing":
        return f"{where} has no value; it needs one"
    # what YAML has made of 007 or 12:30 is not what was written
    way_out = "; put it in quotes" if error["type"] == "string_type" and type(error["input"]) in (int, float) else ""
    return f"{where} must be {_allowed(error)}, got {error['input']!r}{way_out}"


def _unknown_key(cls: type, place: Sequence[int | str], path: str, given: Mapping[str, Any]) -> str:
    level, owner = _found(cls, place[:-1], path)
    return unknown_key(place[-1], level, [f.name for f in fields(owner) if f.name not in given])


def _found(kind: Any, place: Sequence[int | str], path: str) -> tuple[str, Any]:
    """The path of a place as people write it, and the type there; steps that name a type are left out."""
    for step in place:
        kind = next((k for k in get_args(kind) if is_dataclass(k)), kind)  # the dataclass in `A | None`
        if isinstance(step, int):
            path, kind = f"{path}[{step}]", get_args(kind)[0] if get_args(kind) else kind
        elif get_origin(kind) is dict:
            path, kind = f"{path}.{step}", get_args(kind)[1]
        elif is_dataclass(kind) and isinstance(kind, type):
            path, kind = f"{path}.{step}" if path else step, get_type_hints(kind).get(step, Any)
    return path, next((k for k in get_args(kind) if is_dataclass(k)), kind)
