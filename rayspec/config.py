"""Typed configuration: dataclass defaults, then a YAML file, then `key=value` from the command line."""

import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from sglang_ext.settings import build

T = TypeVar("T")
SHIPPED = Path(__file__).parent / "configs"
MAX_SEED = 2**32 - 1  # NumPy takes no larger one, and SGLang hands its own on to it
MAX_INTEGER = 10**18 - 1  # what databases, tensors and generators of random numbers can count


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
    layers: dict[str, DictConfig] = {}
    if path is not None:
        file = shipped_or(Path(path))
        layers[str(file)] = _read_yaml(file)
    if overrides:
        layers["the command line"] = _parse_overrides(overrides)
    try:
        return _build(schema, layers.values())
    except ValueError as error:
        # blame the layer that fails alone with this message, else all of them
        to_blame = [name for name, layer in layers.items() if _refusal(schema, layer) == str(error)]
        source = to_blame[0] if to_blame else " + ".join(layers) or schema.__name__
        raise ValueError(f"{source}: {error}") from error


def _build(schema: type[T], layers: Iterable[DictConfig]) -> T:
    given: dict[str, Any] = {}
    for layer in layers:
        given = _overlaid(given, OmegaConf.to_container(layer))
    try:
        # with the defaults, which interpolations may name, and of which a nested config keeps those that are not given
        merged = OmegaConf.create(_overlaid(_defaults(schema), given, of_defaults=True))
        missing = sorted(OmegaConf.missing_keys(merged))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{where}{str(error.msg or error).splitlines()[0]}") from error
    if missing:  # OmegaConf's own sign, which is no value
        raise ValueError(f"{missing[0]} has no value ('???'); give one, or leave it out")
    assert isinstance(values, dict), "every layer is a mapping"
    _check_values(values)
    return build(schema, {str(key): value for key, value in values.items()})


def _defaults(schema: type) -> dict[str, Any]:
    assert is_dataclass(schema)
    found = {f.name: f.default for f in fields(schema) if f.default is not MISSING}
    found |= {f.name: f.default_factory() for f in fields(schema) if f.default_factory is not MISSING}
    return {name: asdict(value) if is_dataclass(value) else value for name, value in found.items()}  # type: ignore[arg-type]


def _overlaid(under: Any, over: Any, path: str = "", *, of_defaults: bool = False) -> Any:
    """Mappings are merged, key by key; of everything else the later one holds. Raises ValueError where one is a mapping
    and the other is not, unless the first one is a default."""
    if isinstance(under, dict) and isinstance(over, dict):
        below = {key: (under.get(key), value, f"{path}.{key}" if path else str(key)) for key, value in over.items()}
        return under | {key: _overlaid(*both, of_defaults=of_defaults) for key, both in below.items()}
    clashing = next((one for one in (under, over) if not isinstance(one, dict) and one is not None), None)
    if clashing is not None and not of_defaults and isinstance(under, dict) != isinstance(over, dict):
        raise ValueError(f"{path} is given a mapping and {clashing!r}; give one of them")
    return over


def _refusal(schema: type, layer: DictConfig) -> str | None:
    try:
        _build(schema, [layer])
    except ValueError as error:
        return str(error)
    return None


def to_yaml(config: object) -> str:
    """The resolved config as YAML, with every default written out; `load_config` reads it back."""
    assert is_dataclass(config)
    assert not isinstance(config, type)
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def _plain(value: Any) -> Any:
    """The value without dataclasses; one that is an entry {kind: ..., options} keeps its kind."""
    if hasattr(value, "as_yaml"):
        return value.as_yaml()
    if is_dataclass(value):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list | tuple) else value


def flatten(config: object) -> dict[str, str]:
    """The resolved config as {YAML path: value}; lists stay one value. The form that MLflow takes as parameters."""
    return {
        path: ", ".join(map(str, _plain(value))) if isinstance(value, list | tuple) else str(value)
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
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
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


def shipped_or(path: Path) -> Path:
    """What ships with the package is found by its path in a checkout from everywhere."""
    if os.path.exists(path) or path.is_absolute() or path.parts[:1] != (SHIPPED.name,):
        return path
    shipped = SHIPPED.parent / path
    return shipped if shipped.is_file() else path


def _read_yaml(path: Path) -> DictConfig:
    try:
        if not os.path.isfile(path):
            kinds = sorted(f"{SHIPPED.name}/{folder.name}/" for folder in SHIPPED.iterdir() if folder.is_dir())
            raise ValueError(f"no config file at {path}; what ships is found from anywhere under {', '.join(kinds)}")
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
    found: dict[str, Any] = {}
    with _readable("the command line holds no valid YAML value"):
        for item in overrides:
            found = _overlaid(found, OmegaConf.to_container(OmegaConf.from_dotlist([item])))
        return OmegaConf.create(found)


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
