"""A registry with versions of a drafter, good and bad, and clients that stream and count what happens."""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from canary_answers import as_measured, served_answers
from fixture_models import TARGET
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from safetensors.torch import load_file, save_file

from rayspec.records import CanaryAnswer
from rayspec.serving.champion import PINNED
from rayspec.serving.record import ServingRecord, files_sha256
from rayspec.sweep.record.folder import target_files_sha256
from sglang_ext.drafters.complete import write_complete
from sglang_ext.fingerprints import combined_sha256
from sglang_ext.folder_kinds import POLICY, WEIGHTS

MODEL = "drafter-fixture"
ALIAS = "champion"
FLAGS = {"context_length": 512, "max_total_tokens": 16384}
CHAIN = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 5,
}


def write_champion(
    folder: Path,
    drafter: Path,
    *,
    tau: float,
    target: Path = TARGET,
    flags: Mapping[str, Any] = FLAGS,
    policy: Path | None = None,
    canary: tuple[CanaryAnswer, ...] = (),
    damage: Callable[[Path], None] | None = None,
) -> str:
    """A champion's folder with evidence of that tau; the fingerprint of its record. `damage`: to its files, before the
    record is made of them."""
    write_complete(drafter, folder)
    if policy is not None:
        shutil.copyfile(policy, folder / POLICY)
    if damage is not None:
        damage(folder)
    evidence = {"clearly_faster_than_plain": "yes", "tau": f"{tau}", "workload": "fixture", "temperature": "0.0"}
    record = ServingRecord(
        head=drafter.name,
        target=str(target),
        target_sha256=combined_sha256(target_files_sha256(str(target))),
        files=files_sha256(folder),
        flags={**CHAIN, **flags},
        num_threads=1,
        canary=canary,
        evidence=evidence | {"target": str(target), "speedup_vs_plain": "1.5"},
    )
    return record.write(folder)


def edit_weights(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """`edit` the first tensor whose name begins so."""
    tensors = load_file(folder / WEIGHTS)
    found = next(full for full in tensors if full.startswith(name))
    tensors[found] = edit(tensors[found])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def canary_of(folder: Path, drafter: Path) -> tuple[CanaryAnswer, ...]:
    """What a server of a drafter answers to the canary prompts, for the evidence of its versions."""
    write_champion(folder, drafter, tau=2.0)
    return as_measured(served_answers(str(folder))[1])


def add_noise(folder: Path, share: float = 0.2) -> None:
    """To each matrix, of this share of its standard deviation: its drafts are worse, and all else is as it was."""
    tensors, generator = load_file(folder / WEIGHTS), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + share * tensor.float().std() * noise).to(tensor.dtype)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def make_random(folder: Path) -> None:
    """Its head is noise, and its files are whole."""
    noise = torch.Generator().manual_seed(0)
    edit_weights(folder, "lm_head", lambda head: torch.randn(head.shape, generator=noise).to(head.dtype))


def put_nan(folder: Path) -> None:
    edit_weights(folder, "fc.weight", lambda weight: weight.index_fill(0, torch.tensor([5]), math.nan))


def name_other_target(folder: Path) -> None:
    """As one that was trained for another model is."""
    config = json.loads((folder / "config.json").read_text())
    config["rayspec"]["target"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))


def tamper(folder: Path) -> None:
    edit_weights(folder, "fc.weight", lambda weight: weight + 1)


def cut_short(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 1000)


def register(client: MlflowClient, folder: Path, drafter: Path, *, tau: float, **options: Any) -> str:
    """A new version of MODEL, its files in `folder`; `options`: see `write_champion`."""
    pinned = write_champion(folder, drafter, tau=tau, **options)
    with suppress(MlflowException):  # it is there
        client.create_registered_model(MODEL)
    return str(client.create_model_version(MODEL, folder.as_uri(), tags={PINNED: pinned}).version)


def point_at(client: MlflowClient, version: str) -> None:
    client.set_registered_model_alias(MODEL, ALIAS, version)


def tags(client: MlflowClient, version: str) -> dict[str, str]:
    return dict(client.get_model_version(MODEL, version).tags)


@dataclass
class Outcomes:
    """Of all requests. `bad` is what must not happen, in words."""

    completed: int = 0
    retriable: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def ask(client: httpx.Client, address: str, prompt: str, max_tokens: int) -> tuple[str | None, str | None]:
    """(text, why the request may be sent again); raises for everything else."""
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "stream": True}
    parts, is_done = [], False
    with client.stream("POST", f"{address}/v1/completions", json=body) as response:
        if response.status_code == 503:
            response.read()
            assert "Retry-After" in response.headers, response.text
            return None, f"503: {response.json()['error']['message']}"
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return None, f"event: {chunk['error']['message']}"
            parts.append(chunk["choices"][0]["text"] if chunk["choices"] else "")
    assert is_done, "the stream was cut off without a word"
    return "".join(parts), None


@contextmanager
def streaming(
    address: str,
    prompts: Sequence[str],
    expected: Sequence[str],
    *,
    clients: int,
    max_tokens: int,
    pause_s: float = 0.0,
) -> Iterator[Outcomes]:
    """Clients that ask all the time for the length of the block; what they saw is complete once it is left."""
    outcomes, is_over, lock = Outcomes(), threading.Event(), threading.Lock()

    def run(number: int) -> None:
        with httpx.Client(timeout=120, trust_env=False) as client:
            turn = number
            while not is_over.is_set():
                turn += 1
                at = turn % len(prompts)
                begin = time.perf_counter()
                try:
                    text, again = ask(client, address, prompts[at], max_tokens)
                    problem = None if text is None or text == expected[at] else f"prompt {at}: {text!r}"
                except Exception as error:
                    text, again, problem = None, None, f"{type(error).__name__}: {error}"
                with lock:
                    outcomes.seconds.append(time.perf_counter() - begin)
                    if problem is not None:
                        outcomes.bad.append(problem)
                    elif again is not None:
                        outcomes.retriable.append(again)
                    else:
                        outcomes.completed += 1
                is_over.wait(pause_s if again is None else 1.0)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for thread in threads:
            thread.join(180)


def wait_for(what: Any, timeout_s: float, process: Any = None, log: Path | None = None) -> Any:
    """What `what` gives once that is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = what()
        if found:
            return found
        text = log.read_text()[-4000:] if log else ""
        assert process is None or process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(1)
