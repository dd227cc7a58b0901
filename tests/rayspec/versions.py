"""Versions of a drafter by their evidence, and what they answer to canary prompts."""

from collections.abc import Sequence
from pathlib import Path

from rayspec.serving.canary import Answer
from rayspec.serving.champion import Champion
from rayspec.serving.record import ServingRecord
from rayspec.workloads.canary import CANARY_PROMPTS

MODEL = "drafter"
EVIDENCE = {"tau": "2.5", "target": "t", "workload": "chat", "temperature": "0.0"}


def champion(version: str, **evidence: str) -> Champion:
    record = ServingRecord(
        head="full", target="t", target_sha256="0", files={}, flags={}, evidence={**EVIDENCE, **evidence}
    )
    return Champion(name=f"{MODEL} version {version}", folder=Path("."), target="t", served_name="t", record=record)


def answers(accepted: float, *, different: Sequence[int] = ()) -> list[Answer]:
    """Ten verify steps a prompt, `accepted` drafts a step on average with some spread between prompts."""
    found = []
    for n in range(len(CANARY_PROMPTS)):
        drafts = round(10 * accepted + (n % 3 - 1))
        ids = tuple(range(n, n + 20))
        found.append(
            Answer(
                output_ids=(*ids[:-1], -1) if n in different else ids, verify_steps=10, accepted_drafts=max(0, drafts)
            )
        )
    return found
