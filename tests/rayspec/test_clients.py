"""Clients that others wrote, unchanged, on `rayspec serve` with a shipped drafter and a policy, on one machine and
behind Ray Serve: OpenAI's and SGLang's benchmark."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from rollover_world import write_champion
from smollm2 import fetched_target
from transformers import AutoTokenizer

from rayspec.serving.figures import read_totals
from rayspec.shipped import drafter_path

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

from test_serve import server

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Name three rivers of Europe and the seas that they flow into."}]
SCHEMA = {
    "type": "object",
    "properties": {"river": {"type": "string", "maxLength": 20}, "length_km": {"type": "integer"}},
    "required": ["river", "length_km"],
    "additionalProperties": False,
}
RIVER = {"river": {"type": "string", "maxLength": 20}}
PARAMETERS = {"type": "object", "properties": RIVER, "required": ["river"], "additionalProperties": False}
POLICY = Path(__file__).parents[2] / "docs" / "results" / "policy-smollm2" / "policy_own.json"


KEY = "correct-horse-battery"


@pytest.fixture(scope="module", params=["", "--replicas 1"], ids=["one_machine", "ray_serve"])
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """(the target's folder, the port of a server of it)."""
    folder = tmp_path_factory.mktemp("endpoint")
    flags = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 8}
    with (
        fetched_target(folder / "home") as (_, target),
        tempfile.TemporaryDirectory(prefix="rs") as ray_folder,  # short: Ray's sockets lie there
    ):
        drafter = Path(drafter_path("vocabtrim-3072", str(target)))
        write_champion(folder / "champion", drafter, tau=1.3, target=target, flags=flags, policy=POLICY)
        own = {"RAYSPEC_API_KEY": KEY, "RAY_TMPDIR": ray_folder, "RAYSPEC_HOME": str(folder / "home")}
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | own
        line = f"{sys.executable} -m rayspec.cli serve {folder / 'champion'} {request.param}"
        # the target knows no tools; in this format SGLang has it write the call that a request insists on
        with server(line, folder, environment, "-- --tool-call-parser hermes") as (port, process):
            yield target, port
            process.send_signal(signal.SIGTERM)
            process.wait(120)


@pytest.fixture
def client(endpoint: tuple[Path, int]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{endpoint[1]}/v1", api_key=KEY, max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    settings = {"model": "whichever", "messages": QUESTION, "temperature": 0, "max_tokens": 40} | options
    return client.chat.completions.create(**settings)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, endpoint: tuple[Path, int]) -> None:
    assert [model.id for model in client.models.list()] == [str(endpoint[0])]
    whole = chat(client)
    assert whole.usage.completion_tokens == 40
    parts = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert parts[-1].usage.completion_tokens == 40
    assert len(parts) < 40, "a step's drafts come together"


def test_a_completion_of_the_templated_text(client: openai.OpenAI, endpoint: tuple[Path, int]) -> None:
    text = AutoTokenizer.from_pretrained(endpoint[0]).apply_chat_template(
        QUESTION, add_generation_prompt=True, tokenize=False
    )
    done = client.completions.create(model="whichever", prompt=text, temperature=0, max_tokens=40)
    assert done.choices[0].text == chat(client).choices[0].message.content


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "river", "schema": SCHEMA}}
    content = json.loads(chat(client, response_format=wanted, max_tokens=80).choices[0].message.content)
    assert content.keys() == {"river", "length_km"}
    assert isinstance(content["length_km"], int)


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    function = {"name": "length_of_river", "description": "In kilometres.", "parameters": PARAMETERS, "strict": True}
    answer = chat(client, tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=300)
    message = answer.choices[0].message
    assert message.tool_calls, message
    (call,) = message.tool_calls
    assert call.function.name == "length_of_river"
    assert json.loads(call.function.arguments).keys() == {"river"}


def test_counters_of_all_replicas(
    request: pytest.FixtureRequest, client: openai.OpenAI, endpoint: tuple[Path, int]
) -> None:
    """Which say what they are of, where there may be several."""
    chat(client)
    text = httpx.get(f"http://127.0.0.1:{endpoint[1]}/metrics", timeout=60, trust_env=False).text
    samples = [line for line in text.splitlines() if line.startswith("rayspec_verified_requests_total{")]
    assert samples
    assert read_totals(text).requests > 0
    if "ray_serve" in request.node.name:
        assert all(re.search(r'replica="[0-9a-f]{32}"', line) for line in samples)
        assert all(re.search(r'version="[^"]*champion"', line) for line in samples)


def test_what_is_wrong_is_the_client_s_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, max_tokens=-1)
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=[{"role": "user", "content": "x" * 400_000}])


def test_sglang_s_own_benchmark(endpoint: tuple[Path, int], tmp_path: Path) -> None:
    target, port = endpoint
    words = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--model", str(target), "--tokenizer", str(target), "--dataset-name", "random-ids"]
    words += ["--num-prompts", "12", "--random-input-len", "64", "--random-output-len", "32", "--max-concurrency", "4"]
    words += ["--output-file", str(tmp_path / "bench.jsonl")]
    environment = {**os.environ, "OPENAI_API_KEY": KEY}
    run = subprocess.run(words, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "bench.jsonl").read_text())
    assert result["completed"] == 12
    assert result["accept_length"] is None or result["accept_length"] >= 1
