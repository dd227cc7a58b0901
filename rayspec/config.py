"""Configs are dataclasses that check themselves; YAML and `key=value` words say only what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


def load_config(schema: type[T], path: str | Path | None, overrides: Sequence[str] = ()) -> T:
    """Build `schema` from its defaults, then the YAML file, then dotlist overrides such as `model.num_layers=4`."""
    merged: Any = OmegaConf.structured(schema)
    layers = [] if path is None else [(str(path), OmegaConf.load(path))]
    layers.append(("command line", OmegaConf.from_dotlist(list(overrides))))
    for source, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            key = error.full_key or "?"
            parent = OmegaConf.select(merged, key.rpartition(".")[0]) if "." in key else merged
            known = ", ".join(sorted(map(str, parent))) if parent is not None else "?"
            reason = str(error).splitlines()[0]
            raise ValueError(f"{source}: cannot set '{key}' ({reason}); known keys here: {known}") from error
    return OmegaConf.to_object(merged)  # type: ignore[return-value]  # missing values and bad ranges fail here
