"""What SGLang would show of the keys, and headers that it cannot compare; through a real server in test_server.py."""

import pytest
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from sglang_ext.adapter.keys import command_without_keys, decide_for_any_header, words_without_keys


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("--port 1 --api-key a --tp 2", "--port 1 --api-key <redacted> --tp 2"),
        ("--api-key=a --admin-api-key b", "--api-key=<redacted> --admin-api-key <redacted>"),
        ("--tp 2 --api-key", "--tp 2 --api-key"),
        ("--ssl-keyfile-password --api-key", "--ssl-keyfile-password <redacted>"),
        ("--ssl-keyfile-passw a --ssl-keyfile b", "--ssl-keyfile-passw <redacted> --ssl-keyfile b"),
        ("--api=a --admin b --tp 2", "--api=<redacted> --admin <redacted> --tp 2"),
        ("--ssl-keyfile-password a b c --tp 2", "--ssl-keyfile-password <redacted> --tp 2"),
    ],
)
def test_a_command_is_shown_without_keys(command: str, shown: str) -> None:
    assert command_without_keys(command) == shown


def test_words_with_spaces_are_one_word() -> None:
    words = ["serve", "--ssl-keyfile-password", "a b", "--port", "1"]
    assert words_without_keys(words) == ["serve", "--ssl-keyfile-password", "<redacted>", "--port", "1"]


OPEN = ("/health", "/health_generate", "/ready", "/metrics", "/metrics/")


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize("path", [*OPEN, "/", "/v1/models", "/server_info", "/openapi.json", "/v1/health"])
def test_what_needs_no_key(method: str, path: str) -> None:
    """As docs/security.md says."""
    decided = decide_request_auth(
        method=method,
        path=path,
        authorization_header=None,
        api_key="a",
        admin_api_key="b",
        auth_level=AuthLevel.NORMAL,
    )
    assert decided.allowed == (path in OPEN or method == "OPTIONS")


@pytest.mark.parametrize(("header", "seen"), [(None, None), ("Bearer a", "Bearer a"), ("Bearer ä", None)])
def test_a_header_that_is_not_ascii_holds_no_key(header: str | None, seen: str | None) -> None:
    assert decide_for_any_header(lambda **given: given, authorization_header=header, path="/") == {
        "authorization_header": seen,
        "path": "/",
    }
