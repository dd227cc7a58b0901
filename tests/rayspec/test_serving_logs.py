"""The log of `rayspec serve` as one JSON object a line: its own lines, SGLang's and uvicorn's."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rayspec.serving.logs import adopt_loggers, event_log, log, log_level, set_up_logs, sglang_variables

SERVER = """
import logging, warnings
from types import SimpleNamespace
from sglang.srt.utils.common import configure_logger, set_uvicorn_logging_configs
from sglang.srt.utils.log_utils import create_log_targets, log_json
from sglang_ext.json_log import log_as_told
import uvicorn

log_as_told()
warnings.warn("early", stacklevel=1)
configure_logger(SimpleNamespace(log_level="debug"), prefix=" TP0")
set_uvicorn_logging_configs()
logging.getLogger("sglang.x").info("cache of %d tokens", 5)
logging.getLogger("sglang.x").debug("too much")
logging.getLogger("httpx").info("asked")
log_json(create_log_targets(targets=None, name_prefix="sglang.srt.utils.request_logger"), "request", {"rid": "a"})
uvicorn.Config("x:y", log_level="info")  # which configures its log
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:1", "GET", "/health", "1.1", 200)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("uvicorn.error").exception("in the application")
"""


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def loggers() -> Any:
    """What the command sets up is for a process of its own."""
    root, told, events = (logging.getLogger(name) for name in (None, "rayspec.serve", "rayspec.serve.events"))
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in (root, told, events)]
    hook = sys.excepthook
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook = hook


def test_a_name_of_a_champion_steers_no_terminal(loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("text")
    log.info("of\té\nand \x1b]0;mine\x07 \x9b2J\r")
    assert capsys.readouterr().out == "of\té\nand \\x1b]0;mine\\x07 \\x9b2J\\r\n"


def test_every_line_of_a_server_is_an_object(tmp_path: Path) -> None:
    """By SGLang's own functions: its lines, its log of requests, uvicorn's two loggers."""
    command = ["--port", "1", "--log-level", "debug", "--log-level=info"]
    variables = sglang_variables("json", tmp_path / "x.json", {"version": "a version 3", "port": 7}, command)
    done = subprocess.run(
        [sys.executable, "-c", SERVER], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = objects(done.stdout) + objects(done.stderr)
    assert {(line["version"], line["port"]) for line in lines} == {("a version 3", 7)}
    said = {line["message"]: line for line in lines}
    assert [line["logger"] for text, line in said.items() if "early" in text] == ["py.warnings"]
    assert said["cache of 5 tokens"].items() >= {"level": "INFO", "logger": "sglang.x"}.items()
    assert said['127.0.0.1:1 - "GET /health HTTP/1.1" 200']["logger"] == "uvicorn.access"
    assert "ZeroDivisionError" in said["in the application"]["exc_info"]
    assert [json.loads(text)["rid"] for text in said if text.startswith("{")] == ["a"]
    assert not {"too much", "asked"} & said.keys()
    assert sglang_variables("text", tmp_path / "y.json", {}, []) == {}


def test_the_last_level_counts() -> None:
    assert log_level([]) == "INFO"
    assert log_level(["--log-level", "warning", "--log-level=error"]) == "ERROR"


def test_libraries_that_print_by_themselves_print_by_ours(loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    own = logging.getLogger("some.library")
    own.propagate = False
    own.addHandler(logging.StreamHandler())
    set_up_logs("json")
    adopt_loggers()
    own.error("it fails")
    assert own.handlers == []
    (line,) = objects(capsys.readouterr().err)
    assert (line["logger"], line["level"], line["message"]) == ("some.library", "ERROR", "it fails")
    assert line["time"].endswith("Z")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_an_event_is_an_object_in_both(log_format: str, loggers: None, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "kept", "model": "m", "version": "2", "reason": "", "figures": {"tau": 1.5}, "time": "now"}
    set_up_logs(log_format)
    event_log.info("%s version %s: %s", "kept", "2", "", extra=event)
    (line,) = objects(capsys.readouterr().out)
    assert line.items() >= event.items()
    assert (line.keys() == event.keys()) == (log_format == "text")


def test_ray_serve_prints_by_ours() -> None:
    """In a process of its own, as `rayspec serve` has it: Ray Serve brings a handler when it is imported."""
    code = (
        "import logging, rayspec.serving.cluster\n"
        "from rayspec.serving.logs import adopt_loggers, set_up_logs\n"
        "assert logging.getLogger('ray.serve').handlers\n"
        "set_up_logs('json'); adopt_loggers(); logging.getLogger('ray.serve').info('connected')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = [text for text in done.stdout.splitlines() if "connected" in text]  # not what torch says of itself
    assert json.loads(line).items() >= {"logger": "ray.serve", "level": "INFO"}.items()
