"""Text from elsewhere, made fit to be part of a message that a person reads in a terminal."""

from pathlib import Path
from typing import Any

LOG_END_BYTES = 2**20
TAIL_LINES = 30  # of a log, with a traceback


def first_line(error: BaseException) -> str:
    """The first line of an error that is not empty, or its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def escaped(text: str, *, but: str = "") -> str:
    """The text, with what would steer a terminal written as an escape; `but`: characters that stay all the same."""
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in text)


def shortened(text: str, length: int = 120) -> str:
    """The text, cut to this length at most."""
    return text if len(text) <= length else text[: length - 3] + "..."


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log_end(log).splitlines()[-TAIL_LINES:]) if log.is_file() else "(no log)"


def log_end(log: Path) -> str:
    """The last MiB of a log, which may be large; nothing where there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
        return file.read().decode(errors="replace")


def gib(number: float) -> str:
    """A number of bytes."""
    return f"{number / 2**30:.3g} GiB"


def quoted(value: Any) -> str:
    """A value of a file or a setting."""
    return shortened(repr(value))
