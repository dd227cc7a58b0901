"""SGLang's stock server process for a checked champion."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rayspec.champion_fields import OWN_FLAGS, SHAPE
from rayspec.serving.access import Access, check_address
from rayspec.serving.champion import Champion
from rayspec.serving.flags import arguments
from rayspec.serving.process import tethered
from sglang_ext.adapter.keys import words_without_keys
from sglang_ext.folder_kinds import POLICY
from sglang_ext.policy.table import PolicyTable

SERVER = (sys.executable, "-m", "sglang.launch_server")
ADAPTIVE = ("speculative-adaptive", "speculative-adaptive-config")
OTHER_DRAFTS = (*ADAPTIVE, "speculative-draft-window-size")
HARMFUL = {  # flags of SGLang, and what they do to a checked server
    "tokenizer-worker-num": "starts processes that compare no keys, so that whoever reaches the server may change it",
    "delete-ckpt-after-loading": "would delete the target's files",
}
MAX_QUEUED = 4096  # requests that wait for a place among those that run


def server_command(
    champion: Champion, host: str, port: int, more: Sequence[str] = (), *, follows_policy: bool = True
) -> list[str]:
    """What serves it with the settings that it was measured with, draft length by its policy if it has one; `more` are
    further words for SGLang's server. Raises ValueError for those among them that would undo what was checked."""
    check_address(host, port)
    for flag, why in HARMFUL.items():
        if meant_by(more, (flag,)):
            raise ValueError(f"--{flag} behind -- {why}; leave it out")
    if undone := meant_by(more, (*OWN_FLAGS, "revision")):
        raise ValueError(
            f"{undone[0]} behind -- would undo what was checked; target, host, port and key have options of their own "
            "(rayspec serve --help), and another drafter or a file of settings is served by SGLang's own command"
        )
    record = champion.record
    has_policy = follows_policy and champion.policy is not None
    if has_policy and (changed := other_shape(more)):
        raise ValueError(
            f"{changed[0]} behind -- would change the drafts that the policy of {champion.name} was measured with; add "
            "--no-policy, which drafts as said at every load"
        )
    flags = {
        **record.flags,
        "model_path": champion.target,
        "speculative_draft_model_path": str(champion.folder),
    }
    if champion.served_name != champion.target:
        flags["served_model_name"] = champion.served_name
    if has_policy:
        assert champion.policy is not None, "it has one"
        flags |= policy_flags(champion.policy, champion.folder / POLICY, topk=flags["speculative_eagle_topk"])
    own: dict[str, Any] = {"max_queued_requests": MAX_QUEUED}
    own |= {"uvicorn_access_log_exclude_prefixes": ["/metrics", "/health"]}  # which somebody asks for every few seconds
    # tau and times under traffic are read there
    flags = {**own, **flags, "enable_metrics": True, "host": host, "port": port}
    return [*SERVER, *arguments(flags), *more]


def meant_by(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words of SGLang's command line that may mean one of these flags, which are named without dashes: SGLang takes
    a flag by any beginning that is no other's."""
    given = [word.partition("=")[0] for word in words]
    return [w for w in given if w.startswith("--") and len(w) > 2 and any(f"--{flag}".startswith(w) for flag in flags)]


def other_shape(words: Sequence[str]) -> list[str]:
    """The words that may set other drafts than a champion was measured with."""
    return meant_by(words, [*(name.replace("_", "-") for name in SHAPE), *OTHER_DRAFTS])


def policy_flags(policy: PolicyTable, file: Path, topk: int) -> dict[str, Any]:
    """ServerArgs fields: buffers are made for the longest draft that the policy may choose."""
    longest = policy.lengths[-1]
    chain = {"speculative_num_steps": longest, "speculative_num_draft_tokens": longest + 1} if topk == 1 else {}
    return {"speculative_adaptive_config": str(file), **chain}


def described(champion: Champion, command: Sequence[str]) -> str:
    evidence = champion.record.evidence
    low, high = (evidence.get(f"speedup_vs_plain_ci_{end}", "?") for end in ("low", "high"))
    return (
        f"{champion.name}: {champion.record.head} on {champion.record.target}\n"
        f"measured at {evidence.get('traffic', '?')} on {evidence.get('workload', '?')}: "
        f"{evidence.get('speedup_vs_plain', '?')}x of plain decoding ({low} to {high}), "
        f"tau {evidence.get('tau', '?')}\n"
        f"{shlex.join(words_without_keys(command))}"
    )


def serve(
    command: Sequence[str], access: Access, *, num_threads: int | None, variables: Mapping[str, str] | None = None
) -> int:
    """Run the server until it ends or is told to, or this process ends; its exit status. `variables`: more of its
    environment."""
    process: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: FrameType | None) -> None:
        if process is None:
            raise SystemExit(128 + number)
        process.send_signal(number)

    told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, hand_on) for number in told}
    try:
        with tethered(command, access, access.environment(num_threads) | dict(variables or {})) as process:
            return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
