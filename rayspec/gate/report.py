"""What a gate found: a table, a JSON file, an MLflow run."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from rayspec.config import flatten
from rayspec.gate.decision import Bounds, FigureTest, Verdict, as_share
from rayspec.gate.rounds import SIDES, Gate
from rayspec.home import artifact_uri, tracking_uri
from rayspec.tables import render_table
from rayspec.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of both sides. Losses are shares of the baseline's; None where a bound or a value is not known."""

    baseline: float | None
    candidate: float | None
    loss: float | None
    low: float | None
    high: float | None
    margin: float
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The whole outcome. `tau` is None where a side does not tell it."""

    verdict: Verdict
    baseline: str
    candidate: str
    speed: Figure
    tau: Figure | None
    rounds: int
    prompts: int
    compared: int  # greedy outputs; 0 where they were not compared
    mismatches: tuple[str, ...]  # prompts
    seconds: float  # with the start of both sides
    measuring_seconds: float
    notes: tuple[str, ...]


def find(gate: Gate, *, compares: bool, seconds: float, notes: tuple[str, ...] = ()) -> Finding:
    """`compares`: whether both claim the same target, so that greedy outputs must be equal."""
    measured = gate.measured
    mismatches = tuple(measured.mismatches()) if compares else ()
    verdict = gate.verdict
    if mismatches and gate.config.identity == "require":
        verdict = Verdict.REGRESSION
    speeds = [t / s if s else None for t, s in zip(measured.tokens, measured.seconds, strict=True)]
    taus = [gate.judged_counts.tau(side) for side in (0, 1)]
    return Finding(
        verdict=verdict,
        baseline=gate.sides[0].label,
        candidate=gate.sides[1].label,
        speed=_figure(gate.speed, gate.config.speed_loss, speeds),
        tau=None if gate.tau is None else _figure(gate.tau, gate.config.tau_loss, taus),
        rounds=len(measured.losses),
        prompts=len({prompt for prompt, _ in measured.answers}),
        compared=sum(None not in both for both in measured.answers.values()) if compares else 0,
        mismatches=mismatches,
        seconds=seconds,
        measuring_seconds=gate.measuring_s,
        notes=(*notes, *_changed(gate)),
    )


def _changed(gate: Gate) -> list[str]:
    """Greedy answers that do not repeat: the reader should know, and tau's bounds are wider for it."""
    measured = gate.measured
    if not (gate.config.is_greedy and measured.changed):
        return []
    so = ", so that tau is judged as of a sample" if gate.tau is not None and gate.is_sample else ""
    return [f"{measured.changed} of {measured.repeats} repeated greedy answers differed{so}"]


def _figure(test: FigureTest, margin: float, values: list[float | None]) -> Figure:
    bounds = test.bounds or Bounds(low=-math.inf, loss=math.nan, high=math.inf)
    low, loss, high = (as_share(b) if math.isfinite(b) else None for b in (bounds.low, bounds.loss, bounds.high))
    return Figure(
        baseline=values[0],
        candidate=values[1],
        loss=loss,
        low=low,
        high=high,
        margin=margin,
        verdict=test.verdict,
    )


def text(finding: Finding) -> str:
    """The table and what to know beside it."""
    figures = [("output tokens/s", finding.speed, 1), ("tau", finding.tau, 3)]
    rows = [
        [
            name,
            _number(f.baseline, digits),
            _number(f.candidate, digits),
            f"{_share(f.loss)} [{_share(f.low)}, {_share(f.high)}]",
            f"{f.margin:.1%}",
            str(f.verdict),
        ]
        for name, f, digits in figures
        if f is not None
    ]
    table = render_table(["", *SIDES, "loss [bounds]", "allowed", "verdict"], rows)
    lines = [
        table,
        "",
        f"{finding.rounds} rounds (A B B A) over {finding.prompts} prompts in {finding.seconds:.0f} s",
    ]
    if finding.tau is None:
        lines.append(
            "tau: a side does not tell verify steps, or chooses its draft length as it goes, so speed alone was judged"
        )
    if finding.compared:
        different = len(finding.mismatches)
        first = f"; the first is prompt {finding.mismatches[0]}" if different else ""
        lines.append(f"greedy outputs: {different} of {finding.prompts} prompts differ{first}")
    lines += finding.notes
    if finding.verdict is Verdict.UNDECIDED:
        lines.append(_way_out(finding))
    return "\n".join([*lines, f"verdict: {finding.verdict}"])


def _way_out(finding: Finding) -> str:
    open_ones = [n for n, f in (("speed", finding.speed), ("tau", finding.tau)) if f and f.verdict is Verdict.UNDECIDED]
    return (
        f"{' and '.join(open_ones)}: neither a loss nor that there is none could be shown; raise --max-minutes or "
        "concurrency, take longer answers (max_new_tokens), or measure on a quieter machine. A greedy tau is told once "
        "all prompts are through and some of them again, so fewer prompts (workload) tell it sooner, and drawn answers "
        "by their number"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "?" if value is None else f"{value:+.1%}"


def as_json(finding: Finding, gate: Gate, command: str, tags: dict[str, str]) -> str:
    """Everything, with the blocks of each round in the order of measurement: [side, seconds, tokens]."""
    values: dict[str, Any] = {**asdict(finding), "command": command, "config": asdict(gate.config), "provenance": tags}
    values["blocks"] = gate.measured.rounds
    return json.dumps(values, indent=1) + "\n"


def track(finding: Finding, gate: Gate, report: str, command: str, tags: dict[str, str]) -> str:
    """An MLflow run of it; its id."""
    tracker = Tracker(tracking_uri(), gate.config.experiment, artifact_uri())
    own = {"kind": "gate", "gate.verdict": str(finding.verdict), "command": command}
    with tracker.parent("gate", {**own, **tags}) as run:
        run.log_params({"baseline": finding.baseline, "candidate": finding.candidate, **flatten(gate.config)})
        for name, figure in (("speed", finding.speed), ("tau", finding.tau)):
            if figure is not None:
                values = {k: getattr(figure, k) for k in ("baseline", "candidate", "loss", "low", "high")}
                run.log_metrics({f"{name}_{k}": v for k, v in values.items() if v is not None})
        run.log_metrics({"rounds": finding.rounds, "mismatches": len(finding.mismatches), "seconds": finding.seconds})
        run.log_text(report, "gate.md")
        run.log_text(as_json(finding, gate, command, tags), "gate.json")
    return run.run_id
