"""Compares what something stored was made from with what it would be made from now.

Training states, answers, drafters, calibrations and sweeps on disk each carry such a description; whoever finds one
goes on with it, or says what differs.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """`stored` and `wanted` are None where the one or the other does not have the key."""

    key: str
    stored: Any
    wanted: Any


def differences(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], keys: Iterable[str] | None = None
) -> list[Difference]:
    """Where two descriptions differ, also within mappings: `recipe.num_steps`. `keys` are those that are compared, None
    for all that either has."""
    compared = dict.fromkeys([*wanted, *stored] if keys is None else keys)
    found: list[Difference] = []
    for key in compared:
        was, now = stored.get(key), wanted.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            found += [inner._replace(key=f"{key}.{inner.key}") for inner in differences(was, now)]
        elif was != now:
            found.append(Difference(key, was, now))
    return found
