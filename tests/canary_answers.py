"""What a sweep notes of answers to the canary prompts."""

from collections.abc import Sequence

from rayspec.records import CanaryAnswer, ids_sha256
from rayspec.serving.canary import Answer
from rayspec.workloads.canary import CANARY_PROMPTS


def as_measured(answered: Sequence[Answer]) -> tuple[CanaryAnswer, ...]:
    return tuple(
        CanaryAnswer(
            prompt=prompt,
            output_sha256=ids_sha256(answer.output_ids),
            verify_steps=answer.verify_steps,
            accepted_drafts=answer.accepted_drafts,
        )
        for prompt, answer in zip(CANARY_PROMPTS, answered, strict=True)
    )
