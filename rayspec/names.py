"""Names of users' things (prompt categories, folders) as keys that MLflow takes, in one form everywhere."""

import hashlib
import re

NAME_LIMIT = 100  # characters; MLflow's keys have 250, and a group goes before the name
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
