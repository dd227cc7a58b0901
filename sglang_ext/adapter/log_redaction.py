"""SGLang writes all of its arguments into its log when it starts; keys that requests must carry are not for there."""

from collections.abc import Callable
from typing import Any

KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def without_keys(original: Callable[[Any], dict[str, Any]], server_args: Any) -> dict[str, Any]:
    shown = dict(original(server_args))
    return shown | {name: "<redacted>" for name in KEYS if shown.get(name) is not None}
