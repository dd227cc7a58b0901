"""Names of users' things (prompt categories, drafters' folders) in a form that MLflow takes and shows."""

import hashlib
import re
from collections.abc import Sequence

NAME_LIMIT = 100  # characters; MLflow's keys have 250, and a group goes before the name
AXIS_LIMIT = 10  # characters that MLflow's comparison page shows of a value on an axis
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")


def safe_name(text: str) -> str:
    """`text` itself where MLflow takes it in a key, else with `_` for what it refuses, cut, and with a hash.

    The hash keeps names apart that would be the same without what was replaced.
    """
    name = _NOT_ALLOWED.sub("_", text)
    if any(part in ("", ".", "..") for part in name.split("/")):  # MLflow may take a key for a path
        name = re.sub(r"[/.]", "_", name)
    if text and name == text and len(text) <= NAME_LIMIT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{name[: NAME_LIMIT - len(digest) - 1]}-{digest}"


def short_names(names: Sequence[str]) -> dict[str, str]:
    """For each of the different `names` one of at most AXIS_LIMIT characters, and none twice.

    Of longer ones beginning and end, with as much of the end as tells them apart; where nothing does, a number.
    """
    limit = AXIS_LIMIT
    for end in range(4, limit - 2):
        start = limit - 1 - end
        short = [name if len(name) <= limit else f"{name[:start]}…{name[-end:]}" for name in names]
        if len(set(short)) == len(short):
            return dict(zip(names, short, strict=True))
    digits = len(str(len(names)))
    return {name: f"{i:0{digits}d}…{name[digits + 1 - limit :]}" for i, name in enumerate(names, start=1)}
