"""What `rayspec serve` says: as text for a reader at a terminal, or with --log-format json as one JSON object a line.

`log` is what the command tells its user, `event_log` what a roll-over does; both go to stdout, warnings and errors
to stderr. The servers' lines follow SGLang's SGLANG_LOGGING_CONFIG_PATH, for which `sglang_variables` writes a file.
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from pythonjsonlogger.json import JsonFormatter

from rayspec.messages import escaped
from sglang_ext.adapter.internals import LOGGERS
from sglang_ext.json_log import FORMATTER, VARIABLE, JsonLine
from sglang_ext.whole import write_whole

FORMATS = ("text", "json")
log = logging.getLogger("rayspec.serve")
event_log = logging.getLogger("rayspec.serve.events")


class _Printed(logging.Handler):
    """Warnings and errors to stderr, all else to stdout, each as it is when the line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr if record.levelno >= logging.WARNING else sys.stdout, flush=True)


class _Text(logging.Formatter):
    """A champion's names come from whoever promoted it: what would steer the terminal is written as an escape."""

    def format(self, record: logging.LogRecord) -> str:
        text = escaped(super().format(record), but="\t\n")
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def set_up_logs(log_format: str) -> None:
    """For this process. In text an event is a line of JSON with its own fields alone, as it is in MLflow."""
    if log_format == "json":
        _print_by(log, JsonLine())
        _print_by(event_log, JsonLine())
        _print_by(logging.getLogger(), JsonLine(), logging.WARNING)
        logging.captureWarnings(True)
        sys.excepthook = _log_exception
        return
    _print_by(log, _Text())
    _print_by(event_log, JsonFormatter([]))


def adopt_loggers() -> None:
    """Have libraries that print by handlers of their own (Ray, Ray Serve, MLflow) print by ours."""
    for name in list(logging.root.manager.loggerDict):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
                logger.propagate = True


def sglang_variables(
    log_format: str, file: Path, fields: Mapping[str, str | int], command: Sequence[str]
) -> dict[str, str]:
    """Variables of an SGLang server's process that make its lines what `log_format` says.

    Args:
        file: is written where JSON is asked for, and must stay while the server runs.
        fields: of each of its lines.
        command: its words: SGLang does not look at --log-level where a file configures its log.
    """
    if log_format == "text":
        return {}
    handler = {"class": "logging.StreamHandler", "formatter": FORMATTER, "stream": "ext://sys.stdout"}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {FORMATTER: {"()": f"{JsonLine.__module__}.{JsonLine.__name__}", "fields": dict(fields)}},
        "handlers": {"stdout": handler},
        "root": {"level": log_level(command), "handlers": ["stdout"]},
        "loggers": {
            **{name: {"level": "INFO", "handlers": ["stdout"], "propagate": False} for name in LOGGERS},
            **{name: {"level": "WARNING"} for name in ("httpx", "httpcore")},  # as SGLang has it
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(config, indent=1) + "\n")
    return {VARIABLE: str(file)}


def log_level(words: Sequence[str]) -> str:
    """What the words of a server's command say last of --log-level; SGLang's default otherwise."""
    level = "info"
    for word, following in pairwise([*words, ""]):
        flag, is_joined, value = word.partition("=")
        if flag == "--log-level":
            level = value if is_joined else following
    return level.upper()


def _print_by(logger: logging.Logger, formatter: logging.Formatter, level: int = logging.INFO) -> None:
    handler = _Printed()
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


def _log_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    if issubclass(kind, KeyboardInterrupt):
        return sys.__excepthook__(kind, error, trace)
    log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))
