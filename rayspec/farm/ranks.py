"""How many GPUs an engine runs on."""

from collections.abc import Mapping
from math import prod
from typing import Any


def ranks_of(flags: Mapping[str, Any]) -> int:
    """The GPUs of an engine with these ServerArgs fields. Under `enable_dp_attention` the data-parallel ranks are the
    tensor-parallel ones; without it each has an engine's."""
    names = ("tp_size", "pp_size") if flags.get("enable_dp_attention") else ("tp_size", "pp_size", "dp_size")
    return prod(int(flags.get(name) or 1) for name in names)
