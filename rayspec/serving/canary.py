"""Whether a new version may take traffic: it answers a few prompts beside the running one, greedily, and its tokens
must be those of the running one, now or while that was measured. Where none is running yet, its drafts alone are
looked at.

Its tau is held against what it was on these very prompts while it was measured, over those whose answers are the same
tokens as then: of that it may lose 5%. Where the sweep did not ask them, or most answers are others (rounding on
another machine), what can be compared is the ratio of two versions on the same prompts, which should be that of their
evidence where both were measured on one workload at one temperature: within 5% of that (20% where the evidence cannot
be compared, and then of 1), where chance alone does not explain it. And always at least half of the drafts that its
evidence promises a step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rayspec.farm.chat import ChatTokenizer, turn_request
from rayspec.records import CanaryAnswer, ids_sha256
from rayspec.serving.record import ServingRecord
from rayspec.workloads.canary import CANARY_PROMPTS, CANARY_TOKENS, canary_conversations
from sglang_ext.settings import require

SIGNIFICANCE_Z = 1.645  # one-sided 95%


@dataclass(frozen=True, kw_only=True)
class CanaryBounds:
    tau_loss: float = 0.05  # below what was measured on these prompts, or the ratio that the evidence of both promises
    tau_loss_unlike: float = 0.20  # below the running one, where their evidence cannot be compared
    drafts_of_evidence: float = 0.5  # share of the accepted drafts a step that the evidence promises
    mismatches: int = 0  # prompts whose answers may differ; rounding in bf16 can

    def __post_init__(self) -> None:
        require(
            0 <= self.mismatches < len(CANARY_PROMPTS),
            "--canary-mismatches",
            self.mismatches,
            f"in 0..{len(CANARY_PROMPTS) - 1} (there are {len(CANARY_PROMPTS)} canary prompts)",
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt. Without speculation the counts are 0."""

    output_ids: tuple[int, ...]
    verify_steps: int
    accepted_drafts: int


def requests(tokenizer: ChatTokenizer | None) -> list[dict[str, Any]]:
    """Bodies for /generate, in the target's chat template where it has one."""
    sampling = {"temperature": 0, "max_new_tokens": CANARY_TOKENS}
    bodies = []
    for conversation in canary_conversations():
        asked = turn_request(conversation, [], tokenizer)
        bodies.append(
            ({"input_ids": asked["input_ids"]} if "input_ids" in asked else {"text": asked["prompt"]})
            | {"sampling_params": sampling}
        )
    return bodies


def read_answer(body: Mapping[str, Any]) -> Answer:
    """The answer in what SGLang answers to /generate."""
    meta = body["meta_info"]
    return Answer(
        output_ids=tuple(body["output_ids"]),
        verify_steps=meta.get("spec_verify_ct", 0),
        accepted_drafts=meta.get("spec_num_correct_drafts", 0),
    )


def tau(answers: Sequence[Answer | CanaryAnswer]) -> float | None:
    """Pooled; None without speculation."""
    steps = sum(a.verify_steps for a in answers)
    return 1 + sum(a.accepted_drafts for a in answers) / steps if steps else None


def refusal(
    new: Sequence[Answer],
    running: Sequence[Answer],
    record: ServingRecord,
    running_record: ServingRecord,
    bounds: CanaryBounds,
    *,
    compares_tau: bool = True,
) -> str | None:
    """Why the new version may take no traffic; None where it may. `compares_tau` False: the running one follows a
    policy, so that its tau is one of other draft lengths."""
    # An answer that the running version gave alone, while it was measured, is its own as well: beside traffic its
    # batches are larger, and in bf16 rounding with them.
    differ = [
        n
        for n, (prompt, a, b) in enumerate(zip(CANARY_PROMPTS, new, running, strict=True))
        if a.output_ids != b.output_ids and _when_measured(running_record, prompt, a) is None
    ]
    if len(differ) > bounds.mismatches:
        at = _first_difference(new[differ[0]].output_ids, running[differ[0]].output_ids)
        return (
            f"greedy answers to {len(differ)} of {len(new)} canary prompts are not the running version's (first: "
            f"prompt {differ[0] + 1}, token {at + 1}; {bounds.mismatches} may differ)"
        )
    reason = below_evidence(new, record, bounds)
    if reason is not None or not compares_tau or measured_tau(new, record) is not None:
        return reason
    return _below_running(new, running, record.evidence, running_record.evidence, bounds)


def passed(new: Sequence[Answer], running: Sequence[Answer], record: ServingRecord) -> str:
    """What is said of a version that was not refused beside a running one."""
    same = sum(a.output_ids == b.output_ids for a, b in zip(new, running, strict=True))
    return f"{same} of {len(new)} answers are the running version's; {said_of_tau(new, record)}"


def said_of_tau(new: Sequence[Answer], record: ServingRecord) -> str:
    """Of a version that was not refused."""
    taus, said = measured_tau(new, record), f"tau on the canary prompts is {tau(new):.3f}"
    if taus is not None:
        return f"{said}, {taus.now / taus.measured:.3f} of what it was when it was measured"
    if record.canary:
        return f"{said}; most answers are others than when it was measured, so that it cannot be held against that"
    return said


def below_evidence(new: Sequence[Answer], record: ServingRecord, bounds: CanaryBounds) -> str | None:
    """Why a version may take no traffic, by what was measured of it alone; None where it may."""
    reason = _below_promise(new, record.evidence, bounds)
    taus = measured_tau(new, record)
    if reason is not None or taus is None or taus.now >= (1 - bounds.tau_loss) * taus.measured:
        return reason
    return (
        f"tau on the {taus.prompts} canary prompts that it answers as when it was measured is {taus.now:.3f}, "
        f"{taus.now / taus.measured:.3f} of the {taus.measured:.3f} that it was then; at least "
        f"{1 - bounds.tau_loss:.3f} was allowed"
    )


@dataclass(frozen=True, kw_only=True)
class MeasuredTau:
    """tau on the canary prompts whose answers are the tokens of the sweep's: now, and in the sweep."""

    prompts: int
    now: float
    measured: float


def measured_tau(new: Sequence[Answer], record: ServingRecord) -> MeasuredTau | None:
    """None where that is less than half of them, or nothing was drafted. The answers are in the prompts' order."""
    pairs = [
        (own, then)
        for prompt, own in zip(CANARY_PROMPTS, new, strict=True)
        if (then := _when_measured(record, prompt, own)) is not None
    ]
    now, measured = tau([own for own, _ in pairs]), tau([then for _, then in pairs])
    if len(pairs) < len(new) / 2 or now is None or measured is None:
        return None
    return MeasuredTau(prompts=len(pairs), now=now, measured=measured)


def _when_measured(record: ServingRecord, prompt: str, answer: Answer) -> CanaryAnswer | None:
    """The same answer, token for token, as the version of the record gave it while it was measured."""
    asked = (prompt, ids_sha256(answer.output_ids))
    return next((a for a in record.canary if (a.prompt, a.output_sha256) == asked), None)


def _below_promise(new: Sequence[Answer], evidence: Mapping[str, str], bounds: CanaryBounds) -> str | None:
    found = tau(new)
    if found is None:
        return "it was served without speculation: no answer to a canary prompt has verify steps"
    promised = promised_tau(evidence)
    least = None if promised is None else 1 + bounds.drafts_of_evidence * (promised - 1)
    if least is None or found >= least:
        return None
    return (
        f"tau on the canary prompts is {found:.3f}, below {least:.3f}: less than {bounds.drafts_of_evidence:.0%} "
        f"of the accepted drafts that its evidence promises (tau {promised:.3f} on {evidence.get('workload', '?')})"
    )


def _below_running(
    new: Sequence[Answer],
    running: Sequence[Answer],
    evidence: Mapping[str, str],
    running_evidence: Mapping[str, str],
    bounds: CanaryBounds,
) -> str | None:
    new_tau, running_tau = tau(new), tau(running)
    if new_tau is None or running_tau is None:
        return None
    expected = expected_ratio(evidence, running_evidence)
    loss = bounds.tau_loss_unlike if expected is None else bounds.tau_loss
    least = (1 - loss) * (1.0 if expected is None else expected)
    if math.log(new_tau / running_tau) + SIGNIFICANCE_Z * _standard_error(new, running) >= math.log(least):
        return None
    source = "as their evidence cannot be compared" if expected is None else f"{expected:.3f} by the evidence of both"
    return (
        f"tau on the canary prompts is {new_tau:.3f}, {new_tau / running_tau:.3f} of the running version's "
        f"{running_tau:.3f}; at least {least:.3f} was allowed ({source})"
    )


def expected_ratio(evidence: Mapping[str, str], running_evidence: Mapping[str, str]) -> float | None:
    """The expected ratio of tau, from what was measured of both; None for another workload or temperature."""
    alike = all(
        evidence.get(k) is not None and evidence.get(k) == running_evidence.get(k)
        for k in ("target", "workload", "temperature")
    )
    ours, theirs = promised_tau(evidence), promised_tau(running_evidence)
    return ours / theirs if alike and ours and theirs else None


def promised_tau(evidence: Mapping[str, str]) -> float | None:
    """What was measured; None where the evidence does not say it, or says what tau cannot be."""
    try:
        found = float(evidence["tau"])
    except (KeyError, ValueError):
        return None
    return found if 1 <= found < math.inf else None


def _standard_error(new: Sequence[Answer], running: Sequence[Answer]) -> float:
    """Standard error of the logarithm of the ratio, by leaving out one prompt after the other (jackknife)."""
    ratios = []
    for left_out in range(len(new)):
        taus = [tau([*side[:left_out], *side[left_out + 1 :]]) for side in (new, running)]
        if taus[0] is None or taus[1] is None:
            return 0.0
        ratios.append(math.log(taus[0] / taus[1]))
    mean, n = fmean(ratios), len(ratios)
    return math.sqrt((n - 1) / n * sum((r - mean) ** 2 for r in ratios))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))
