"""Checks of single values out of YAML and JSON."""

import math
from typing import Any


def check_type(name: str, value: Any, wanted: Any) -> None:
    """Raise ValueError for a value out of YAML or JSON that is not of a field's type; a whole number may be a float,
    which must be finite."""
    is_endless = isinstance(value, float) and not math.isfinite(value)
    if is_endless or type(value) not in ((int, float) if wanted is float else (wanted,)):
        raise ValueError(f"{name} must be of type {getattr(wanted, '__name__', wanted)}, got {value!r}")
