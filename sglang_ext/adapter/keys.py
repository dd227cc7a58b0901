"""The keys that requests must carry: where SGLang would show them, and a key that it cannot compare.

SGLang shows its arguments in its log, in /server_info and in its dumps, each time through one function that takes the
secrets of its watermarks out.
"""

from collections.abc import Callable, Sequence
from typing import Any

KEYS = ("api_key", "admin_api_key", "ssl_keyfile_password")
REDACTED = "<redacted>"
NO_KEYS = ("--ssl-keyfile",)  # the beginning of a flag that takes one


def without_keys(original: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
    """AROUND redact_watermark_secrets, which calls itself for every value within a value."""
    shown = original(value, **kwargs)
    if not isinstance(shown, dict):
        return shown
    hidden = {name: REDACTED for name in KEYS if shown.get(name) is not None}
    command = shown.get("launch_command")
    return shown | hidden | ({"launch_command": command_without_keys(command)} if isinstance(command, str) else {})


def command_without_keys(command: str) -> str:
    """SGLang joins the words by spaces, those of a file of settings among them; what a key with spaces was parted into
    ends at the next flag."""
    shown: list[str] = []
    for word in words_without_keys(command.split(" ")):
        follows_key = bool(shown) and shown[-1].endswith(REDACTED)
        if not follows_key or word.startswith("--"):
            shown.append(word)
    return " ".join(shown)


def words_without_keys(words: Sequence[str]) -> list[str]:
    """The words of a command line, with what stands for a key in place of each."""
    shown = list(words)
    for i, word in enumerate(shown):
        flag, equals, _ = word.partition("=")
        if _takes_key(flag):
            shown[i] = f"{flag}={REDACTED}" if equals else word
            if not equals and i + 1 < len(shown):
                shown[i + 1] = REDACTED
    return shown


def _takes_key(flag: str) -> bool:
    """SGLang's parser takes a flag by any beginning that is no other's; some beginnings here are nobody's."""
    flags = [f"--{name.replace('_', '-')}" for name in KEYS]
    return len(flag) > 2 and flag not in NO_KEYS and any(key.startswith(flag) for key in flags)


def decide_for_any_header(original: Callable[..., Any], *, authorization_header: str | None, **kwargs: Any) -> Any:
    """AROUND decide_request_auth: a header that is not ASCII holds no key (`rayspec serve` refuses such keys), where
    the comparison would fail and be answered with 500."""
    if authorization_header is not None and not authorization_header.isascii():
        authorization_header = None
    return original(authorization_header=authorization_header, **kwargs)
