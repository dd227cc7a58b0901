"""Makes, from a finished sweep, the policy that its winner is served with: what a step of each draft length costs at
each load, and what is accepted."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from rayspec.sweep.plan.trials import PLAIN, Trial
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from sglang_ext.policy.table import FORMAT, CostCurve, PolicyTable

FEW_BLOCKS = (
    "the policy's costs are of {blocks} prompt block(s) at some load, and fewer than {least} do not say how far they "
    "are off: a policy that takes the wrong draft length for the best is slower than the best (docs/results/"
    "policy-smollm2); sweep a larger workload, or smaller blocks (block_prompts, at least the streams), and promote "
    "again"
)

Request = Mapping[str, Any]  # as `StoredSweep.requests` gives them
ONE_LOAD = (
    "its sweep measured no two loads in streams with drafts and without, so there is no policy: it drafts as much at "
    "every load, and at another than the measured one it may be slower than plain decoding (sweep with several loads, "
    "as in concurrency=[1,4,16], and promote again)"
)


def measured_policy(sweep: StoredSweep, best: TrialResult) -> PolicyTable | None:
    """For the drafter and shape of `best`: a chain's every measured draft length, a tree's own, each at all loads in
    streams. None where the sweep did not measure at least two such loads with drafts and without."""
    found = _trials(sweep.results, best)
    requests = {trial: list(sweep.requests(trial)) for trials in found.values() for trial in trials.values()}
    plain = {streams: requests[trial] for streams, trial in found.get(0, {}).items()}
    curves = []
    for k, trials in sorted(found.items()):
        points = [(n, beside_plain(requests[t], k, plain.get(n, []))) for n, t in sorted(trials.items())]
        measured = [(n, round(ms, 4)) for n, ms in points if ms is not None]
        if measured:
            curves.append(
                CostCurve(draft_steps=k, requests=[n for n, _ in measured], step_ms=[ms for _, ms in measured])
            )
    curves = [curve for curve in curves if len(curve.requests) > 1]  # one load says nothing of another
    longest = max((curve.draft_steps for curve in curves), default=0)
    if longest == 0 or curves[0].draft_steps != 0:
        return None
    return PolicyTable(
        format_version=FORMAT,
        curves=curves,
        accepted_if_reached=accepted_if_reached(
            (r for trial in found[longest].values() for r in requests[trial]), longest
        ),
        about={
            "target": sweep.params["target"],
            "drafter": best.trial.label,
            "workload": sweep.params["workload"],
            "temperature": str(sweep.temperature(best.trial)),
            "sweep_run_id": sweep.run_id,
        },
    )


def fewest_blocks(sweep: StoredSweep, best: TrialResult) -> int:
    """Of prompts, behind any cost of its policy."""
    trials = [trial for by_streams in _trials(sweep.results, best).values() for trial in by_streams.values()]
    return min(len({request["block"] for request in sweep.requests(trial)}) for trial in trials)


def has_loads(results: Iterable[TrialResult], best: TrialResult) -> bool:
    """Whether a policy follows from what was measured, but for trials without an answer of two tokens."""
    lengths = [k for k, trials in _trials(results, best).items() if len(trials) > 1]
    return 0 in lengths and len(lengths) > 1


def _trials(results: Iterable[TrialResult], best: TrialResult) -> dict[int, dict[int, Trial]]:
    """Trials of the drafter and shape of `best`, by draft length (0: plain decoding) and streams."""
    lengths = None if best.trial.drafted.shape.topk == 1 else {best.trial.draft_steps}
    found: dict[int, dict[int, Trial]] = {}
    for result in results:
        trial = result.trial
        if result.error or trial.traffic.is_open or trial.label not in (PLAIN, best.trial.label):
            continue
        if trial.traffic.temperature != best.trial.traffic.temperature:  # other tokens are accepted
            continue
        if trial.candidate is None or lengths is None or trial.draft_steps in lengths:
            found.setdefault(trial.draft_steps, {})[trial.traffic.concurrency] = trial
    return found


def beside_plain(requests: Sequence[Request], draft_steps: int, plain: Sequence[Request]) -> float | None:
    """Milliseconds of a step, as if measured when plain decoding was on average: cohorts are minutes apart, in which a
    machine becomes faster or slower, but each of their blocks was decoded plainly, too. None where it was not."""
    blocks = {r["block"] for r in requests}
    ours = milliseconds_a_step(requests, draft_steps)
    then = milliseconds_a_step([r for r in plain if r["block"] in blocks], 0)
    always = milliseconds_a_step(plain, 0)
    return None if ours is None or then is None or always is None else ours * always / then


def milliseconds_a_step(requests: Iterable[Request], draft_steps: int) -> float | None:
    """Such that tau over it is the measured rate of tokens after the first, of a request; what other requests'
    prefills and the ends of answers take is in it. None where no answer had a second token."""
    decode_s, emitted, steps, accepted = 0.0, 0, 0, 0
    for r in requests:
        decode_s += r["e2e_s"] - r["ttft_s"]
        emitted += r["output_tokens"] - 1
        steps, accepted = steps + r["verify_steps"], accepted + r["accepted_drafts"]
    if emitted <= 0 or decode_s <= 0 or (draft_steps and not steps):
        return None
    tau = 1 + accepted / steps if draft_steps else 1.0
    return 1e3 * tau * decode_s / emitted


def accepted_if_reached(requests: Iterable[Request], draft_steps: int) -> list[float]:
    """The share accepted at positions 1, 2, ..., among the steps that accepted all before; 0 where none did."""
    exactly = [0] * (draft_steps + 1)
    for r in requests:
        for accepted, count in enumerate(r["accepted_histogram"]):
            exactly[accepted] += count
    at_least = [sum(exactly[i:]) for i in range(draft_steps + 1)]
    return [round(b / a, 4) if a else 0.0 for a, b in pairwise(at_least)]


def policy_text(table: PolicyTable) -> str:
    return json.dumps(asdict(table), indent=1) + "\n"
