"""Whether a new version may take traffic: it answers a few prompts beside the running one, greedily, and its tokens
must be the same. Where none is running yet, its drafts alone are looked at (`below_promise`).

Its tau there cannot be held to that of its evidence, which is of other prompts. What can be compared is the ratio of
two versions on the same prompts, which should be that of their evidence where both were measured on one workload at one
temperature. So: the ratio within 5% of that (20% where the evidence cannot be compared, and then of 1), where chance
alone does not explain it; and at least half of the drafts that its evidence promises a step, whatever the prompts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rayspec.farm.chat import ChatTokenizer, turn_request
from rayspec.workloads import Conversation
from sglang_ext.settings import require

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a fox who learns to swim.",
    "Explain in two sentences why the sky is blue.",
    "List five vegetables and a dish that each is used in.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Summarise how a bill becomes a law in three steps.",
    "Translate to German: The train leaves at seven in the morning.",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost? Explain.",
    "Give me three tips for a job interview.",
    "def quicksort(items):",
    "import os\n\ndef list_files(folder):",
    "What is the difference between a list and a tuple in Python?",
    "Write a polite e-mail that asks for a day off.",
    "Describe how to make a cup of tea, step by step.",
    "SELECT name, COUNT(*) FROM orders",
    "Who wrote Romeo and Juliet, and when?",
)
MAX_TOKENS = 64
SIGNIFICANCE_Z = 1.645  # one-sided 95%


@dataclass(frozen=True, kw_only=True)
class CanaryBounds:
    tau_loss: float = 0.05  # below the ratio that the evidence of both promises
    tau_loss_unlike: float = 0.20  # below the running one, where their evidence cannot be compared
    drafts_of_evidence: float = 0.5  # share of the accepted drafts a step that the evidence promises
    mismatches: int = 0  # prompts whose answers may differ; rounding in bf16 can

    def __post_init__(self) -> None:
        require(
            0 <= self.mismatches < len(PROMPTS),
            "--canary-mismatches",
            self.mismatches,
            f"in 0..{len(PROMPTS) - 1} (there are {len(PROMPTS)} canary prompts)",
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one prompt. Without speculation the counts are 0."""

    output_ids: tuple[int, ...]
    verify_steps: int
    accepted_drafts: int


def requests(tokenizer: ChatTokenizer | None) -> list[dict[str, Any]]:
    """Bodies for /generate, in the target's chat template where it has one."""
    sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS}
    bodies = []
    for number, text in enumerate(PROMPTS):
        asked = turn_request(Conversation(id=f"canary-{number}", category="canary", turns=(text,)), [], tokenizer)
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


def tau(answers: Sequence[Answer]) -> float | None:
    """Pooled; None without speculation."""
    steps = sum(a.verify_steps for a in answers)
    return 1 + sum(a.accepted_drafts for a in answers) / steps if steps else None


def refusal(
    new: Sequence[Answer],
    running: Sequence[Answer],
    evidence: Mapping[str, str],
    running_evidence: Mapping[str, str],
    bounds: CanaryBounds,
    *,
    compares_tau: bool = True,
) -> str | None:
    """Why the new version may take no traffic; None where it may. `compares_tau` False: the running one follows a
    policy, so that its tau is one of other draft lengths."""
    differ = [n for n, (a, b) in enumerate(zip(new, running, strict=True)) if a.output_ids != b.output_ids]
    if len(differ) > bounds.mismatches:
        at = _first_difference(new[differ[0]].output_ids, running[differ[0]].output_ids)
        return (
            f"greedy answers to {len(differ)} of {len(new)} canary prompts are not the running version's (first: "
            f"prompt {differ[0] + 1}, token {at + 1}; {bounds.mismatches} may differ)"
        )
    reason = below_promise(new, evidence, bounds)
    return reason or (_below_running(new, running, evidence, running_evidence, bounds) if compares_tau else None)


def below_promise(new: Sequence[Answer], evidence: Mapping[str, str], bounds: CanaryBounds) -> str | None:
    """Why a version may take no traffic, where there is no other to hold it against; None where it may."""
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
