"""The canary: a server of a version that takes no traffic, answers the canary prompts and ends. Knows no Ray."""

import sys
from collections.abc import Sequence
from typing import Any

import httpx
from tqdm import tqdm

from rayspec.serving.access import Access
from rayspec.serving.canary import Answer, CanaryBounds, below_promise, read_answer, requests, tau
from rayspec.serving.champion import Champion
from rayspec.serving.logs import told
from rayspec.serving.process import STOP_TIMEOUT_S, ServerFailed, ServerProcess
from rayspec.serving.version import ServedVersion, start_server

ANSWER_TIMEOUT_S = 600.0


def answers_of_a_canary(version: ServedVersion) -> list[Answer]:
    """Of a server of its own that has ended since. Raises ValueError for files that are not what was checked,
    ServerFailed where it does not serve."""
    champion, server = start_server(version)
    try:
        return canary_answers(server, champion.target, version.access)
    finally:
        server.stop(STOP_TIMEOUT_S)


def check_promise(champion: Champion, answers: Sequence[Answer]) -> None:
    """Says what was found. Raises ValueError for a version that may take no traffic."""
    reason = below_promise(answers, champion.record.evidence, CanaryBounds())
    if reason is not None:
        raise ValueError(
            f"{champion.name} takes no traffic: {reason}; promote another, or serve this one all the same with "
            "--no-canary"
        )
    told.info("%s: tau on the canary prompts is %.3f", champion.name, tau(answers))


def canary_answers(server: ServerProcess, target: str, access: Access) -> list[Answer]:
    """One prompt after the other: rounding depends on what shares a batch. Raises ServerFailed."""
    headers = {} if access.key is None else {"Authorization": f"Bearer {access.key}"}
    options: Any = {"desc": "canary", "unit": " prompts", "disable": not sys.stderr.isatty()}
    try:
        with httpx.Client(base_url=server.address, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            return [_answer(client, body, headers) for body in tqdm(requests(_tokenizer(target)), **options)]
    except httpx.HTTPError as error:
        raise ServerFailed(f"a canary prompt got no answer ({type(error).__name__}: {error})") from error


def _answer(client: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> Answer:
    response = client.post("/generate", json=body, headers=headers)
    if response.status_code != 200:
        raise ServerFailed(f"a canary prompt was refused with status {response.status_code}: {response.text[:300]}")
    return read_answer(response.json())


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)
