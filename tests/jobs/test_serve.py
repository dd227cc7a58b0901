"""The commands that a champion and a report name: as text, and run as a user would."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "rayspec"))  # the synthetic sweep

from fixture_models import TARGET
from published import publish, undrawn
from servers import START_TIMEOUT_S, listening
from synthetic import few_trials, make_synthetic_sweep

from rayspec.report.page import write_report
from rayspec.report.promote import default_model, promote, winner
from rayspec.serving.flags import arguments
from rayspec.serving.process import free_port
from rayspec.sweep.record.stored import find_sweep
from rayspec.tracking import Tracker


def commands(folder: Path, target: str) -> dict[str, list[str]]:
    """The lines of the champion's description, and the first of the report, of a sweep of the target."""
    tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "tests", (folder / "artifacts").as_uri())
    sweep = few_trials(make_synthetic_sweep(), target=target)
    stored = find_sweep(tracker.client, publish(tracker, sweep))
    with undrawn():
        markdown, _ = write_report(stored, folder / "report")
    model = promote(stored, folder / "report", winner(stored.results)).model
    description = tracker.client.get_model_version_by_alias(model, "champion").description
    return {name: _block(text) for name, text in (("champion", description), ("report", markdown.read_text()))}


def _block(text: str) -> list[str]:
    """The last one of the champion's are the lines for who serves it by hand."""
    found = re.findall(r"```\n(.*?)\n```", text, re.DOTALL)
    assert found, text
    return found[-1].splitlines()


def test_the_commands_name_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    lines = commands(tmp_path, "./model")
    fetch, served = lines["champion"]
    (measured,) = lines["report"]
    assert re.fullmatch(r"MLFLOW_TRACKING_URI=sqlite:///\S+ mlflow artifacts download .* --dst-path champion", fetch)
    for line, drafter in ((served, "champion/drafter-[0-9a-f]{12}"), (measured, None)):
        words = shlex.split(line)
        flags = dict(zip(words[3::2], words[4::2], strict=True))
        assert words[:3] == ["python", "-m", "sglang.launch_server"]
        assert flags["--model-path"] == str(tmp_path / "model")
        assert drafter is None or re.fullmatch(drafter, flags["--speculative-draft-model-path"])
        assert drafter or (Path(flags["--speculative-draft-model-path"]) / "config.json").is_file()
        assert int(flags["--speculative-num-draft-tokens"]) == 1 + int(flags["--speculative-num-steps"])


def test_engine_settings_become_flags() -> None:
    flags = {"tp_size": 2, "disable_cuda_graph": True, "enable_mixed_chunk": False, "cuda_graph_bs": [1, 2], "x": None}
    words = ["--tp-size", "2", "--disable-cuda-graph", "--cuda-graph-bs", "1", "2", "--json-model-override-args"]
    assert arguments({**flags, "json_model_override_args": {"a": 1}}) == [*words, '{"a": 1}']


@pytest.mark.slow
def test_the_champion_is_served_by_its_own_lines(tmp_path: Path) -> None:
    fetch, served = commands(tmp_path, str(TARGET))["champion"]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    subprocess.run(["bash", "-c", fetch], cwd=tmp_path, env=environment, check=True, timeout=START_TIMEOUT_S)
    with server(served, tmp_path, environment) as (port, process):
        body = {"text": "import os\n\ndef ", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            meta = json.load(response)["meta_info"]
        assert meta["completion_tokens"] == 24
        assert meta["spec_verify_ct"] < 24  # drafts were accepted
        # PyTorch's rendezvous, which has no address of its own to set; the endpoint itself is local
        assert {program for program, is_local in listening(process.pid) if not is_local} == {"sglang::scheduler"}


@pytest.mark.slow
def test_a_champion_is_served_to_who_has_the_key(tmp_path: Path) -> None:
    """The whole command, with SGLang's own server: on the loopback address, with the key nowhere to be read."""
    folder = tmp_path / "store"
    commands(folder, str(TARGET))
    key = "correct-horse-battery"
    environment = {**os.environ, "RAYSPEC_HOME": str(tmp_path / "home"), "RAYSPEC_API_KEY": key}
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    line = f"{sys.executable} -m rayspec.cli serve models:/{default_model(str(TARGET))}@champion"
    body = {"model": "demo", "prompt": "import os", "temperature": 0, "max_tokens": 12}

    def ask(port: int, **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **headers},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)

    with server(line, tmp_path, environment) as (port, process):
        assert ask(port, Authorization=f"Bearer {key}")["usage"]["completion_tokens"] == 12
        for headers in ({}, {"Authorization": "Bearer another"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(port, **headers)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert not [p for p in family if key in " ".join(p.cmdline())]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        _, left = psutil.wait_procs(family, timeout=60)
        assert left == []
    assert key not in (tmp_path / "server.log").read_text()
    assert [f for f in (tmp_path / "home").rglob("*") if f.is_file() and key.encode() in f.read_bytes()] == []


@contextmanager
def server(command: str, folder: Path, environment: dict[str, str], more: str = "") -> Iterator[tuple[int, Any]]:
    """(port, process) of the command, which ends with `more`."""
    port, log = free_port(), folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command} --port {port} {more}"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield port, process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
