"""The canary: a server of a version that takes no traffic, answers the canary prompts and ends. Knows no Ray."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from rayspec.home import prepared_home
from rayspec.provenance import releases
from rayspec.serving.canary import (
    Answer,
    CanaryBounds,
    below_evidence,
    promised_tau,
    read_answer,
    requests,
    said_of_tau,
    tau,
)
from rayspec.serving.champion import Champion
from rayspec.serving.launch import meant_by, other_shape
from rayspec.serving.logs import log
from rayspec.serving.process import STOP_TIMEOUT_S, ServerFailed, ServerProcess, failure
from rayspec.serving.version import ServedVersion, logger, start_server
from sglang_ext.json_text import parse_json
from sglang_ext.whole import write_whole

ANSWER_TIMEOUT_S = 600.0
DEPLOYED_ANEW = (
    "name another version in source, or serve this one all the same with canary: false in the args (where these stay "
    "as they are, Ray Serve builds nothing anew)"
)
# with which a server cannot be asked over plain HTTP by itself
NOT_ALONE = (
    *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-keyfile-password", "enable-ssl-refresh", "grpc-mode"),
    *("smg-grpc-mode", "encoder-only", "disaggregation-mode", "nnodes", "node-rank"),
)


def check_words(more: Sequence[str], *, on_ray: bool) -> None:
    """Raises ValueError for SGLang's own flags under which no canary, and on Ray no replica, can be asked."""
    words = meant_by(more, NOT_ALONE)
    if words and on_ray:
        raise ValueError(
            f"{words[0]} behind --: Ray Serve's replicas ask their servers over plain HTTP, each by itself, so they "
            "cannot be asked; put a proxy with TLS before the ingress, or serve by SGLang's own command"
        )
    if words:
        raise ValueError(
            f"{words[0]} behind --: the canary asks its server over plain HTTP, and by itself, so it cannot be asked; "
            "add --no-canary, or put a proxy with TLS before the server"
        )


def answers_of_a_canary(version: ServedVersion) -> list[Answer]:
    """Answers of a server of its own, which has ended since. Raises ValueError for files that are not what was checked,
    ServerFailed where it does not serve."""
    return _asked(version)[1]


def try_version(version: ServedVersion) -> None:
    """The same and whether it may take traffic, unless it has passed from this home before: with these very files,
    SGLang's flags and threads, on these releases. Raises ValueError for a version that may not, too."""
    mark = prepared_home() / "serving" / f"{version.record_sha256}.passed"
    terms = {
        "record_sha256": version.record_sha256,
        "flags": list(version.more),
        "num_threads": version.num_threads,
        "releases": releases(),
    }
    if _passed(mark) == terms:
        return
    champion, answers = _asked(replace(version, follows_policy=False))
    champion = replace(champion, name=version.name)  # a fetched one is called by its folder
    check_promise(champion, answers, version.more, DEPLOYED_ANEW)
    about = {"version": version.name}
    logger.info("%s has passed the canary with tau %.3f", version.name, tau(answers), extra=about)
    try:
        mark.parent.mkdir(exist_ok=True)
        write_whole(mark, json.dumps({"version": version.name, "tau": tau(answers), "terms": terms}, indent=1) + "\n")
    except OSError as error:  # it has passed all the same
        logger.warning("%s cannot be written (%s): the next replica tries it again", mark, error, extra=about)


def _passed(mark: Path) -> Any:
    """What a version has passed with; None where it has not, or the mark is none of ours."""
    try:
        return parse_json(mark.read_bytes())["terms"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _asked(version: ServedVersion) -> tuple[Champion, list[Answer]]:
    champion, server = start_server(version)
    try:
        return champion, answers_of(server, champion.target, version)
    finally:
        server.stop(STOP_TIMEOUT_S)


def check_promise(
    champion: Champion,
    answers: Sequence[Answer],
    more: Sequence[str] = (),
    way_out: str = "promote another, or serve this one all the same with --no-canary",
) -> None:
    """Says what was found. `more`: SGLang's own flags; under another draft length than the evidence's only speculation
    itself is looked for. Raises ValueError, with the way out, for a version that may take no traffic."""
    about = {"version": champion.name}
    others = other_shape(more)
    record = champion.record.without_evidence() if others else champion.record
    if others:
        log.warning(
            "%s: its evidence is of another draft length, so tau is not held against it", others[0], extra=about
        )
    elif promised_tau(record.evidence) is None:
        log.warning(
            "%s: its evidence holds no tau, so only speculation itself is looked for", champion.name, extra=about
        )
    reason = below_evidence(answers, record, CanaryBounds())
    if reason is not None:
        raise ValueError(f"{champion.name} takes no traffic: {reason}; {way_out}")
    log.info("%s: %s", champion.name, said_of_tau(answers, record), extra=about)


def answers_of(server: ServerProcess, target: str, version: ServedVersion) -> list[Answer]:
    """One prompt after the other: rounding depends on what shares a batch. Raises ServerFailed."""
    key = version.access.key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    is_shown = sys.stderr.isatty() and version.log_format == "text"
    bodies = requests(_tokenizer(target, trusts_code="--trust-remote-code" in version.more))
    try:
        with httpx.Client(base_url=server.address, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            return [
                _answer(client, body, headers)
                for body in tqdm(bodies, desc="canary", unit=" prompts", disable=not is_shown)
            ]
    except httpx.HTTPError as error:
        said = f"a canary prompt got no answer ({type(error).__name__}: {error})"
        raise failure(said, server.log, was_killed=server.was_killed) from error


def _answer(client: httpx.Client, body: dict[str, Any], headers: dict[str, str]) -> Answer:
    response = client.post("/generate", json=body, headers=headers)
    if response.status_code != 200:
        raise ServerFailed(f"a canary prompt was refused with status {response.status_code}: {response.text[:300]}")
    return read_answer(response.json())


def _tokenizer(target: str, *, trusts_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target, trust_remote_code=trusts_code)
