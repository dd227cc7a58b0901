"""JSON that others have written, read so that whatever is wrong with it is a ValueError."""

import json
from typing import Any, NoReturn


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is no UTF-8, nested too deep, or holds NaN or a number
    that is too long to be one."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def check_mapping(value: Any, name: str) -> dict[str, Any]:
    """`value` as it is. Raises ValueError for anything but a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r}")
    return value
