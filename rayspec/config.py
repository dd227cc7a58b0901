"""Typed configuration: dataclass defaults, then a YAML file, then `key=value` from the command line."""

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

T = TypeVar("T")
SHIPPED = Path(__file__).parent / "configs"
MOST_INTEGER = 10**18 - 1  # what databases, tensors and generators of random numbers can count


def _refuse_environment(name: str, *default: object) -> str:
    raise ValueError(
        f"${{oc.env:{name}}} would put the variable's value, which may be a secret, into MLflow and the report; give "
        "the value itself, or leave it to the program that reads the variable"
    )


OmegaConf.register_resolver("oc.env", _refuse_environment, replace=True)


def load_config(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """The config of dataclass `schema`: its defaults, overlaid by the YAML at `path` and by `key.sub=value` overrides.

    Raises ValueError naming the source and the setting for a missing file, an unknown key (with those known at its
    level), a missing or wrongly typed value, a number that is not finite, and for whatever the dataclass itself refuses
    in `__post_init__`.
    """
    layers: list[tuple[str, DictConfig]] = []
    if path is not None:
        file = _shipped_or(Path(path))
        layers.append((str(file), _read_yaml(file)))
    if overrides:
        layers.append(("the command line", _parse_overrides(overrides)))
    merged, source = OmegaConf.structured(schema), schema.__name__
    try:
        for name, layer in layers:
            source = name
            _check_layer(schema, layer)
            merged = OmegaConf.merge(merged, layer)
        source = " + ".join(name for name, _ in layers) or schema.__name__
        result = OmegaConf.to_object(merged)
        _check_values(result)
    except MissingMandatoryValue as error:
        raise ValueError(f"{source}: {error.full_key} has no value; give it in the file or as a key=value") from error
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{source}: {where}{str(error.msg or error).splitlines()[0]}") from error
    except TypeError as error:  # of a list for a mapping inside a setting of any type; it names none
        clash = _clash(OmegaConf.to_container(merged), OmegaConf.to_container(layer), "")
        raise ValueError(f"{source}: {clash or error}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    assert isinstance(result, schema), "a structured config turns into its own dataclass"
    return result


def to_yaml(config: object) -> str:
    """The resolved config as YAML, with every default written out; `load_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: object) -> dict[str, str]:
    """The resolved config as {YAML path: value}; lists stay one value. The form that MLflow takes as parameters."""
    return {
        path: ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for path, value in _leaves(config)
    }


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(YAML path, value) of everything that is neither a dataclass nor a mapping."""
    if is_dataclass(node):
        pairs = [(f.name, getattr(node, f.name)) for f in fields(node)]
    elif isinstance(node, dict):
        pairs = list(node.items())
    else:
        yield path, node
        return
    for key, child in pairs:
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _check_values(config: object) -> None:
    """Raise ValueError for a number that no setting means (NaN, infinity, more digits than anything has), and for text
    that no path or name can be."""
    for path, value in _leaves(config):
        if isinstance(value, list | tuple):
            for i, entry in enumerate(value):
                _check_values({f"{path}[{i}]": entry})
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{path} must be a finite number, got {value}")
        elif isinstance(value, int) and abs(value) > MOST_INTEGER:
            raise ValueError(f"{path} must be a number of at most 18 digits, got one of {len(str(abs(value)))}")
        elif isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
            raise ValueError(f"{path} must be text in UTF-8 without a zero byte, got {value!r}")


def _is_unicode(text: str) -> bool:
    """False for what the command line held in bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shipped_or(path: Path) -> Path:
    """What ships with the package is found by its path in a checkout from everywhere."""
    if os.path.exists(path) or path.is_absolute() or path.parts[:1] != (SHIPPED.name,):
        return path
    shipped = SHIPPED.parent / path
    return shipped if shipped.is_file() else path


def _read_yaml(path: Path) -> DictConfig:
    try:
        if not os.path.isfile(path):
            raise ValueError(f"no config file at {path}")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error})") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    with _readable(f"{path} is no valid YAML"):
        loaded = OmegaConf.load(io.StringIO(text))
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"{path} must hold `key: value` lines, got a list")
    return loaded


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            raise ValueError(f"expected key=value (such as draft_steps=[2,4]), got {item!r}")
    with _readable("the command line holds no valid YAML value"):
        return OmegaConf.from_dotlist(list(overrides))


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Whatever the YAML parser raises for a text that it cannot take, as a ValueError that begins with `what`."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{what}: it is nested too deep") from None
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{what}: {where}{str(error.msg or error).splitlines()[0]}") from error
    except (YAMLError, ValueError, OSError, TypeError, AttributeError) as error:  # OSError: a number alone
        raise ValueError(f"{what}: {error}") from error


def _check_layer(schema: type, layer: DictConfig) -> None:
    """Raise ValueError for `???`, OmegaConf's own sign, which would quietly leave a value as it was, and as
    `_check_forms`."""
    missing = sorted(OmegaConf.missing_keys(layer))
    if missing:
        raise ValueError(f"{missing[0]} has no value ('???'); give one, or leave it out")
    given = OmegaConf.to_container(layer)
    assert isinstance(given, dict), "the callers refuse anything else"
    _check_forms(schema, given, "")


def _check_forms(schema: type, given: dict[Any, Any], path: str) -> None:
    """Raise ValueError, naming the setting, for an unknown key, and for what OmegaConf refuses without its name or
    takes in silence: a list for a mapping and the reverse, a list in a list of texts, a number for a yes or no."""
    hints = get_type_hints(schema)
    for key, value in given.items():
        name = f"{path}{key}"
        if key not in hints:
            level = f" under {path[:-1]}" if path else ""
            raise ValueError(f"unknown key {name!r}; known{level}: {', '.join(hints)}")
        if value is not None:
            _check_form(_without_none(hints[key]), value, name)


def _check_form(kind: Any, value: Any, name: str) -> None:
    if get_origin(kind) is list:
        _require(isinstance(value, list), name, "a list, [a, b]", value)
        for i, entry in enumerate(value):
            _check_form(get_args(kind)[0], entry, f"{name}[{i}]")
    elif get_origin(kind) is dict or is_dataclass(kind):
        _require(isinstance(value, dict), name, "a mapping, {key: value}", value)
        if get_origin(kind) is not dict:
            _check_forms(kind, value, f"{name}.")
    elif kind is bool:
        _require(not isinstance(value, int | float) or value in (0, 1), name, "true or false", value)
    else:
        _require(not isinstance(value, list | dict), name, "a single value", value)


def _clash(before: Any, given: Any, path: str) -> str | None:
    """Which setting is a mapping and is given a list, or the other way round."""
    if isinstance(before, dict) and isinstance(given, dict):
        found = (_clash(before[key], given[key], f"{path}.{key}") for key in given if key in before)
        return next((clash for clash in found if clash), None)
    if isinstance(before, dict | list) and isinstance(given, dict | list) and type(before) is not type(given):
        return f"{path[1:]} must be {'a mapping' if isinstance(before, dict) else 'a list'}, got {given!r}"
    return None


def _without_none(kind: Any) -> Any:
    return next(k for k in get_args(kind) if k is not NoneType) if get_origin(kind) in (Union, UnionType) else kind


def _require(is_valid: bool, name: str, allowed: str, value: object) -> None:
    if not is_valid:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
