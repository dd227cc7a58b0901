"""SGLang's stock server process for a checked champion."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import yaml

from rayspec.serving.champion import Champion
from rayspec.serving.flags import arguments
from rayspec.serving.record import OWN_FLAGS
from sglang_ext.adapter.http_app import DEFAULT_MIB, VARIABLE
from sglang_ext.artefacts import POLICY
from sglang_ext.policy.table import PolicyTable

KEY_VARIABLE = "RAYSPEC_API_KEY"
ADMIN_VARIABLE = "RAYSPEC_ADMIN_KEY"  # without it nobody has the key
MAX_QUEUED = 4096  # requests that wait for a place among those that run


def server_command(
    champion: Champion, host: str, port: int, more: Sequence[str] = (), *, follows_policy: bool = True
) -> list[str]:
    """What serves it with the settings that it was measured with, draft length by its policy if it has one; `more` are
    further words for SGLang's server. Raises ValueError for those among them that would undo what was checked."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port must be in 1..65535, got {port}")
    if not host or any(c.isspace() for c in host):
        raise ValueError(f"--host must be an address without spaces, got {host!r}")
    for word in more:
        flag = word.partition("=")[0]
        # SGLang takes a flag by any beginning that is no other's
        meant = [own for own in OWN_FLAGS if flag.startswith("--") and len(flag) > 2 and f"--{own}".startswith(flag)]
        if meant:
            raise ValueError(
                f"{flag} behind -- would undo what was checked; target, host, port and key have options of their own "
                "(rayspec serve --help), and another drafter or a file of settings is served by SGLang's own command"
            )
    record = champion.record
    flags = {
        **record.flags,
        "model_path": champion.target,
        "speculative_draft_model_path": str(champion.folder),
    }
    if follows_policy and champion.policy is not None:
        flags |= policy_flags(champion.policy, champion.folder / POLICY, topk=flags["speculative_eagle_topk"])
    flags = {"max_queued_requests": MAX_QUEUED, **flags, "host": host, "port": port}
    return [sys.executable, "-m", "sglang.launch_server", *arguments(flags), *more]


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
        f"{shlex.join(command)}"
    )


def api_key(file: str | None) -> str | None:
    """The key that requests must carry: of a file, or of the environment. Raises ValueError for an empty one."""
    if file is None:
        return key_of_environment(KEY_VARIABLE)
    try:
        return _checked(Path(file).read_text(), file)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {file} cannot be read ({error})") from error


def key_of_environment(variable: str) -> str | None:
    """Raises ValueError for an empty one."""
    text = os.environ.get(variable)
    return None if text is None else _checked(text, variable)


def _checked(text: str, source: str) -> str:
    key = text.strip()
    if not key or not key.isprintable() or " " in key:
        raise ValueError(f"the key of {source} must be one word of printable characters that is not empty")
    return key


def serve(command: Sequence[str], *, num_threads: int | None, key: str | None, max_body_mib: int = DEFAULT_MIB) -> int:
    """Run the server until it ends or is told to; its exit status. Keys stay out of the list of processes.

    Routes that change the server (weights, settings, pauses) take the administrator's key alone, and where nobody has
    named one, one that nobody knows: what they load was not checked.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, ADMIN_VARIABLE)}
    environment[VARIABLE] = str(max_body_mib)
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    with TemporaryDirectory() as folder:
        keys = {"admin-api-key": key_of_environment(ADMIN_VARIABLE) or secrets.token_hex(32)}
        keys |= {"api-key": key} if key is not None else {}
        secret = Path(folder) / "secret.yaml"
        secret.touch(mode=0o600)
        secret.write_text(yaml.safe_dump(keys))
        words = [*command, "--config", str(secret)]
        process: subprocess.Popen[bytes] | None = None

        def hand_on(number: int, frame: FrameType | None) -> None:
            if process is None:
                raise SystemExit(128 + number)
            process.send_signal(number)

        told = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, hand_on) for number in told}
        try:
            process = subprocess.Popen(words, env=environment)
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
