"""JSON that others have written, read so that whatever is wrong with it is a ValueError."""

import json
from collections import Counter
from typing import Any, NoReturn


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is no UTF-8, nested too deep, or holds a key
    twice, NaN or a number that is too long to be one."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it holds {twice!r} twice; leave one of them out")
    return found


def check_mapping(value: Any, name: str) -> dict[str, Any]:
    """`value` as it is. Raises ValueError for anything but a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return value
