"""The sweep's table, as Markdown that also reads well in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayspec.report.decision import ratio, verdicts
from rayspec.tables import render_table

if TYPE_CHECKING:
    from rayspec.sweep.record.results import TrialResult

HEADERS = ["drafter", "steps", "traffic", "tau", "rho", "scored", "head us", "nu", "kappa", "tokens/s"]
HEADERS += ["vs plain [95% CI]", "vs {baseline} [95% CI]", "predicted"]


MAX_OTHER_CPU = 0.1  # share of the CPU time from which on speed-ups are not to be trusted


NOTES = (
    "tau: tokens per verify step, 1 + accepted drafts / steps; rho: tau relative to {baseline}'s. scored: tokens "
    "that the head scored for a row, in the mean; truncations and routed heads compare at equal ones. head us: the "
    "head alone, one call; nu: relative to {baseline}'s. kappa: the part of {baseline}'s head in a cycle against the "
    "rest of it. predicted: the speed-up over {baseline} that rho, nu and kappa give, all else equal; none for trees "
    "that are pruned to other sizes than its.\n"
    "Speed-ups compare throughput on the same prompts in the same minutes; CI: bootstrap over prompt blocks, not "
    "corrected for choosing the best of several."
)


def notes(results: "Sequence[TrialResult]") -> str:
    """What the columns mean."""
    lines = [
        NOTES.format(baseline=baseline_of(results)),
        "In the name of a trial, s4 stands for 4 draft steps, c4 for 4 streams, r2.5 for 2.5 requests/s, x2 for a "
        "trace twice as fast as it was, t1 for temperature 1.",
    ]
    if any(r.trial.traffic.is_open for r in results):
        lines.append(
            "Under so many requests a second, and under a trace's, the arrivals fix the throughput: there a speed-up "
            "compares the time from arrival to the last token, per output token."
        )
    return "\n".join(lines)


def results_table(results: "Sequence[TrialResult]") -> str:
    """A row for each trial, failed ones included."""
    ordered = sorted(results, key=lambda r: (r.trial.traffic, r.trial.draft_steps))
    headers = [header.format(baseline=baseline_of(results)) for header in HEADERS]
    return render_table(headers, [_row(r) for r in ordered])


def baseline_of(results: "Sequence[TrialResult]") -> str:
    """What the trials of a sweep are compared with, by its label."""
    return results[0].baseline if results else "the baseline"


def latency_table(results: "Sequence[TrialResult]") -> str:
    """What a user waits for, in milliseconds: to the first token (TTFT), and for each one after it (TPOT)."""
    ordered = sorted((r for r in results if not r.error), key=lambda r: (r.trial.traffic, r.trial.draft_steps))
    names = [f"{kind}_ms_p{p}" for kind in ("ttft", "tpot") for p in (50, 90, 99)]
    headers = [f"{name[:4].upper()} p{name[-2:]} ms" for name in names]
    return render_table(
        ["drafter", "steps", "traffic", *headers],
        [
            [
                r.trial.label,
                str(r.trial.draft_steps or "-"),
                str(r.trial.traffic),
                *(f"{r.metrics[name]:.1f}" if name in r.metrics else "-" for name in names),
            ]
            for r in ordered
        ],
    )


def busy(results: "Sequence[TrialResult]") -> str:
    """A warning where other programs kept the machine busy while it was measured; else empty."""
    shares = [r.metrics["other_cpu_share"] for r in results if "other_cpu_share" in r.metrics]
    if not shares or max(shares) < MAX_OTHER_CPU:
        return ""
    mean = sum(shares) / len(shares)
    return (
        f"WARNING: the machine was busy while it was measured: other programs used {mean:.0%} of the CPU time on "
        f"average of the trials, {max(shares):.0%} at most. Speed-ups from a busy machine can be far from those of a "
        "quiet one; measure again when it is quiet."
    )


def mismatches(results: "Sequence[TrialResult]") -> str:
    """Whether answers differ from plain decoding's; empty where that was not looked at."""
    different = {r.trial.name: int(r.metrics["output_mismatches"]) for r in results if _differs(r)}
    if different:
        listed = ", ".join(f"{name} {count}" for name, count in different.items())
        return f"Answers that differ from plain decoding's (lossless would be none): {listed}."
    if any("output_mismatches" in r.metrics for r in results):
        return "Every answer is token for token that of plain decoding."
    return ""


def summary(results: "Sequence[TrialResult]") -> str:
    """The table, a verdict for each traffic, what the columns mean, and the first line of each failure."""
    explained = "\n".join(line for line in (notes(results), mismatches(results)) if line)
    failed = [f"{r.trial.name} FAILED: {r.error.splitlines()[0]}" for r in results if r.error]
    parts = [results_table(results), busy(results), "\n".join(verdicts(results).values()), explained, *failed]
    return "\n\n".join(part for part in parts if part)


def _row(result: "TrialResult") -> list[str]:
    t, m = result.trial, result.metrics
    cells = [t.label, str(t.draft_steps or "-"), str(t.traffic)]
    if result.error:
        return [*cells, "FAILED", *["-"] * (len(HEADERS) - len(cells) - 1)]

    def cell(metric: str, form: str = ".2f") -> str:
        return format(m[metric], form) if metric in m else "-"

    return [
        *cells,
        cell("tau"),
        cell("rho", ".3f"),
        cell("shortlist_mean", ".0f"),
        cell("head_latency_us", ".0f"),
        cell("nu"),
        cell("kappa"),
        cell("output_tokens_per_s", ".1f"),
        ratio(result.speedup("plain")),
        "baseline" if result.is_baseline else ratio(result.speedup("baseline")),
        "-" if result.is_baseline else cell("speedup_vs_baseline_predicted"),
    ]


def _differs(result: "TrialResult") -> bool:
    return result.metrics.get("output_mismatches", 0) > 0
