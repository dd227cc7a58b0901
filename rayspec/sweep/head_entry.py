"""An entry of a sweep's `heads`: all heads that it asks for, and what each is called. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, get_args, get_origin, get_type_hints

from rayspec.shipped import drafter_label
from sglang_ext.heads import HEADS, HeadConfig, head_class
from sglang_ext.settings import Settings, check_type, kind_and_options, unknown_key

OWN = ("drafter", "artifacts")  # what an entry says beside the head
PATH = "heads"  # in messages, to which the entry's number is added


@dataclass(frozen=True)
class AskedHead(Settings):
    """One head of an entry.

    `options`: its kind and what was written of it, also of a head in a head, each value checked by itself. What is left
    out comes from the drafter, where that has a head of this kind, or from the calibration: the head's config is built
    once these are known.
    """

    options: Mapping[str, Any]
    drafter: str | None = None
    artifacts: str | None = None

    @property
    def kind(self) -> str:
        return str(self.options["kind"])


@dataclass(frozen=True)
class HeadEntry(Settings):
    """An entry of `heads`: {kind, options, drafter, artifacts}, each value one or a list of several."""

    given: Mapping[str, Any]
    asked: tuple[AskedHead, ...]

    @classmethod
    def parse(cls, given: Any) -> "HeadEntry":
        """Raises ValueError for an entry that no head can be made by, whatever its drafter: an unknown kind or option,
        a value that its option does not take, or as `combinations`."""
        return cls(given, tuple(_asked(values, PATH) for values in combinations(given, PATH)))

    def as_yaml(self) -> dict[str, Any]:
        """Inverse of `parse`; what a config's YAML says of it."""
        return dict(self.given)


def combinations(entry: Mapping[str, Any], path: str) -> list[dict[str, Any]]:
    """Every combination of the values that stand in lists, also in a head in a head. An option that is a list itself is
    one value, and several in a list of lists. Raises ValueError for an unknown kind, an empty list, and what comes
    twice."""
    kind, _ = kind_and_options(entry, HEADS, path)
    hints = get_type_hints(head_class(kind).Config)
    choices: dict[str, list[Any]] = {}
    for name, value in entry.items():
        where = f"{path}.{name}"
        if isinstance(value, Mapping) and hints.get(name) is HeadConfig:
            choices[name] = combinations(value, where)
        elif not isinstance(value, list):
            choices[name] = [value]
        else:
            is_one = _is_list(hints.get(name)) and not any(isinstance(v, list) for v in value)
            choices[name] = [value] if is_one and value else value
        if not choices[name]:
            raise ValueError(f"{where} is an empty list; give it at least one value, or leave it out")
        twice = [v for i, v in enumerate(choices[name]) if v in choices[name][:i]]
        if twice:
            raise ValueError(f"{where} must be without repetition, got {twice[0]!r} twice")
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _asked(values: Mapping[str, Any], path: str) -> AskedHead:
    options = {name: value for name, value in values.items() if name not in OWN}
    _check_types(options, path, OWN)
    for name in OWN:
        if values.get(name) is not None:
            check_type(f"{path}.{name}", values[name], str)
    return AskedHead({"kind": options.pop("kind"), **options}, values.get("drafter"), values.get("artifacts"))


def _check_types(entry: Any, path: str, beside: Sequence[str] = ()) -> None:
    kind, options = kind_and_options(entry, HEADS, path)
    config = head_class(kind).Config
    plain, checked = get_type_hints(config), get_type_hints(config, include_extras=True)
    known = [f.name for f in fields(config)]
    for name, value in options.items():
        where = f"{path}.{name}"
        if name not in known:
            raise ValueError(unknown_key(name, path, [*known, *beside]))
        if plain[name] is HeadConfig:
            _check_types(value, where)
        else:
            check_type(where, value, checked[name])


def _is_list(hint: Any) -> bool:
    return any(get_origin(kind) in (tuple, list) for kind in (hint, *get_args(hint)))


def filled_in(given: Mapping[str, Any], asked: Mapping[str, Any], completed: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, and those that completing the entry has added, also in a head in a head."""
    own = {
        name: filled_in(value, asked[name], completed[name]) if isinstance(value, Mapping) else value
        for name, value in {"kind": given["kind"], **given}.items()  # its kind first, however an entry has them
    }
    return own | {name: v for name, v in completed.items() if given.get(name) is None and v != asked.get(name)}


def label(given: Mapping[str, Any], artifacts: str | None, drafter: str | None) -> str:
    """`slimspec-rank32`, `truncated-size512-vocabtrim`: the kind and all options that were given, so that a head has
    one name in every sweep, the calibration, and a drafter that is not the baseline."""
    parts = [
        *_parts(given),
        *([drafter_label(artifacts)] if artifacts else []),
        *([f"on-{drafter}"] if drafter else []),
    ]
    return "-".join(parts)


def _parts(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _parts(value)
        elif isinstance(value, list):
            yield name + "_".join(map(str, value))
        else:
            yield str(value) if isinstance(value, str) else f"{name}{value}"
