"""What others say, in our messages."""

import pytest

from rayspec.messages import escaped, first_line, quoted, shortened


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("\n \n one\ntwo"), " one"), (ValueError(), "ValueError"), (OSError(2, "gone"), "[Errno 2] gone")],
)
def test_the_first_line_or_the_type(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_what_would_steer_a_terminal_is_an_escape() -> None:
    assert escaped("é\x1b]0;mine\x07\n\u202e") == "é\\x1b]0;mine\\x07\\n\\u202e"
    assert escaped("a\tb\n\r", but="\t\n") == "a\tb\n\\r"


def test_long_values_are_cut() -> None:
    assert shortened("a" * 9, 9) == "a" * 9
    assert shortened("a" * 10, 9) == "a" * 6 + "..."
    assert quoted(["x"]) == "['x']"
    assert len(quoted("x" * 1000)) == 120
