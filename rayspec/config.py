"""Typed configuration: dataclass defaults, then a YAML file, then `key=value` from the command line."""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

T = TypeVar("T")


def _refuse_environment(name: str, *default: object) -> str:
    raise ValueError(
        f"${{oc.env:{name}}} would put the variable's value, which may be a secret, into MLflow and the report; give "
        "the value itself, or leave it to the program that reads the variable"
    )


OmegaConf.register_resolver("oc.env", _refuse_environment, replace=True)


def load_config(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """The config of dataclass `schema`: its defaults, overlaid by the YAML at `path` and by `key.sub=value` overrides.

    Raises ValueError naming the source and the setting for a missing file, an unknown key (with those known at its
    level), a missing or wrongly typed value, and for whatever the dataclass itself refuses in `__post_init__`.
    """
    defaults = OmegaConf.structured(schema)
    layers: list[tuple[str, DictConfig]] = []
    if path is not None:
        layers.append((str(path), _read_yaml(Path(path))))
    if overrides:
        layers.append(("the command line", _parse_overrides(overrides)))
    merged, source = defaults, schema.__name__
    try:
        for name, layer in layers:
            source = name
            merged = OmegaConf.merge(merged, layer)
        source = " + ".join(name for name, _ in layers) or schema.__name__
        result = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise ValueError(_unknown_key(source, defaults, error.full_key or str(error.key))) from error
    except MissingMandatoryValue as error:
        raise ValueError(f"{source}: {error.full_key} has no value; give it in the file or as a key=value") from error
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ValueError(f"{source}: {where}{str(error.msg or error).splitlines()[0]}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    assert isinstance(result, schema), "a structured config turns into its own dataclass"
    return result


def to_yaml(config: object) -> str:
    """The resolved config as YAML, with every default written out; `load_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: object) -> dict[str, str]:
    """The resolved config as {YAML path: value}; lists stay one value. The form that MLflow takes as parameters."""

    def walk(node: Any, prefix: str) -> dict[str, str]:
        if is_dataclass(node):
            pairs = [(f.name, getattr(node, f.name)) for f in fields(node)]
        elif isinstance(node, dict):
            pairs = list(node.items())
        else:
            text = ", ".join(map(str, node)) if isinstance(node, list | tuple) else str(node)
            return {prefix: text}
        return {key: value for name, child in pairs for key, value in walk(child, f"{prefix}.{name}").items()}

    return {key.removeprefix("."): value for key, value in walk(config, "").items()}


def _read_yaml(path: Path) -> DictConfig:
    if not path.is_file():
        raise ValueError(f"no config file at {path}")
    try:
        loaded = OmegaConf.load(path)
    except YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    if isinstance(loaded, ListConfig):
        raise ValueError(f"{path} must hold `key: value` lines, got a list")
    return loaded


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for item in overrides:
        if "=" not in item or item.startswith(("-", "=")):
            raise ValueError(f"expected key=value (such as draft_steps=[2,4]), got {item!r}")
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except YAMLError as error:
        raise ValueError(f"the command line holds no valid YAML value: {error}") from error


def _unknown_key(source: str, defaults: DictConfig, full_key: str) -> str:
    level, _, _ = full_key.rpartition(".")
    known = OmegaConf.select(defaults, level) if level else defaults
    names = ", ".join(str(key) for key in known) if isinstance(known, DictConfig) else "none"
    return f"{source}: unknown key {full_key!r}; known{' under ' + level if level else ''}: {names}"
