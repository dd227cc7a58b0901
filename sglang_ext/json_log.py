"""A line of the log as one JSON object, by python-json-logger: for rayspec's own lines, SGLang's and uvicorn's."""

import json
import logging
import logging.config
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pythonjsonlogger.json import JsonFormatter

VARIABLE = "SGLANG_LOGGING_CONFIG_PATH"  # SGLang's own: a file of logging.config.dictConfig
FORMATTER = "rayspec_json"  # its name in a logging configuration that rayspec writes
FIELDS = ("asctime", "levelname", "name", "process", "message")
RENAMED = {"asctime": "time", "levelname": "level", "name": "logger"}


class JsonLine(JsonFormatter):
    """time (UTC), level, logger, process, message, what a call gave as `extra`, and exc_info of an exception.

    Args:
        fields: more of them, the same in each line.
        text_options: of the formatter of text that it stands in for, such as uvicorn's; they say nothing here.
    """

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, fields: Mapping[str, str | int] | None = None, **text_options: object) -> None:
        super().__init__(FIELDS, rename_fields=RENAMED, static_fields=dict(fields or {}))
        self.converter = time.gmtime


def log_as_told() -> None:
    """Follow the file of SGLANG_LOGGING_CONFIG_PATH, where rayspec wrote it, in what SGLang leaves out: from the start,
    in warnings, and in uvicorn's lines. (SGLang's main process logs as text all the same while it reads its arguments.)
    """
    file = os.environ.get(VARIABLE)
    config = json.loads(Path(file).read_text()) if file else {}
    formatter = config.get("formatters", {}).get(FORMATTER)
    if formatter is None:
        return
    from uvicorn.config import LOGGING_CONFIG

    logging.config.dictConfig(config)
    logging.captureWarnings(True)
    for text in LOGGING_CONFIG["formatters"].values():
        text.update(formatter)
