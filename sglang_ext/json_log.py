"""A line of the log as one JSON object, by python-json-logger: for rayspec's own lines, SGLang's and uvicorn's."""

import time
from collections.abc import Mapping

from pythonjsonlogger.json import JsonFormatter

FORMATTER = "rayspec_json"  # its name in a logging configuration that rayspec writes
FIELDS = ("asctime", "levelname", "name", "process", "message")
RENAMED = {"asctime": "time", "levelname": "level", "name": "logger"}


class JsonLine(JsonFormatter):
    """time (UTC), level, logger, process, message, what a call gave as `extra`, and exc_info of an exception.

    Args:
        fields: more of them, the same in each line.
        text_options: of the formatter of text that it stands in for, such as uvicorn's; they say nothing here.
    """

    converter = time.gmtime
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, fields: Mapping[str, str | int] | None = None, **text_options: object) -> None:
        super().__init__(FIELDS, rename_fields=RENAMED, static_fields=dict(fields or {}))
