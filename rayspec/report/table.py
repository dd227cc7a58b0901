"""The sweep's table and its verdicts, as Markdown that also reads well in a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayspec.farm.load import Traffic
from rayspec.statistics import Interval

if TYPE_CHECKING:
    from rayspec.sweep.results import TrialResult

HEADERS = ["head", "steps", "traffic", "tau", "rho", "head us", "nu", "kappa", "tokens/s"]
HEADERS += ["vs plain [95% CI]", "vs full [95% CI]", "predicted"]


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(headers), rule, *(line(row) for row in rows)])


def summary(results: "Sequence[TrialResult]") -> str:
    """The table, a verdict for each traffic, what the columns mean, and the first line of each failure."""
    ordered = sorted(results, key=lambda r: (r.trial.traffic, r.trial.draft_steps))
    parts = [render_table(HEADERS, [_row(r) for r in ordered])]
    parts.append("\n".join(verdicts(results).values()))
    notes = [
        "tau: tokens per verify step, 1 + accepted drafts / steps; rho: tau relative to the full head's. head us: the "
        "head alone, one call; nu: relative to the full head's. kappa: the full head's part of a cycle against the "
        "rest of it. predicted: the speed-up over the full head that rho, nu and kappa give, all else equal.",
        "Speed-ups compare throughput on the same prompts in the same minutes; CI: bootstrap over prompt blocks, "
        "not corrected for choosing the best of several.",
        *_open_loop_note(results),
    ]
    mismatches = {r.trial.name: int(r.metrics["output_mismatches"]) for r in results if _differs(r)}
    if mismatches:
        listed = ", ".join(f"{name} {count}" for name, count in mismatches.items())
        notes.append(f"Answers that differ from plain decoding's (lossless would be none): {listed}.")
    elif any("output_mismatches" in r.metrics for r in results):
        notes.append("Every answer is token for token that of plain decoding.")
    parts.append("\n".join(notes))
    failed = [f"{r.trial.name} FAILED: {r.error.splitlines()[0]}" for r in ordered if r.error]
    return "\n\n".join([*parts, *failed])


def verdicts(results: "Sequence[TrialResult]") -> dict[Traffic, str]:
    """A verdict for each traffic."""
    traffics = sorted({r.trial.traffic for r in results})
    return {t: verdict(t, [r for r in results if r.trial.traffic == t]) for t in traffics}


def verdict(traffic: Traffic, results: "Sequence[TrialResult]") -> str:
    """One sentence: the fastest trial, and whether it beats plain decoding and the full head beyond doubt."""
    start = f"{traffic}:"
    drafted = [r for r in results if r.speedup("plain") is not None]
    if not drafted:
        return f"{start} no speed-up could be measured."
    best = max(drafted, key=lambda r: r.metrics["speedup_vs_plain"])
    plain, full = best.speedup("plain"), best.speedup("full")
    assert plain is not None, "filtered above"
    claim = {
        True: "speculation pays",
        False: "speculation does NOT pay, plain decoding is faster",
        None: "not clearly different from plain decoding",
    }[_beats_one(plain)]
    text = (
        f"{start} {claim}. Best: {best.trial.head} with {best.trial.draft_steps} draft steps, {_ratio(plain)} of plain"
    )
    if not best.is_baseline and full is not None:
        claim = {True: "faster than", False: "slower than", None: "not clearly different from"}[_beats_one(full)]
        text += f"; {claim} the full head with as many steps ({_ratio(full)})"
    return text + "."


def _open_loop_note(results: "Sequence[TrialResult]") -> list[str]:
    if not any(r.trial.traffic.is_open for r in results):
        return []
    return [
        "Under so many requests a second the arrivals fix the throughput: there a speed-up compares the time from "
        "arrival to the last token, per output token."
    ]


def _row(result: "TrialResult") -> list[str]:
    t, m = result.trial, result.metrics
    cells = [t.head, str(t.draft_steps or "-"), str(t.traffic)]
    if result.error:
        return [*cells, "FAILED", *["-"] * (len(HEADERS) - len(cells) - 1)]

    def cell(metric: str, form: str = ".2f") -> str:
        return format(m[metric], form) if metric in m else "-"

    return [
        *cells,
        cell("tau"),
        cell("rho", ".3f"),
        cell("head_latency_us", ".0f"),
        cell("nu"),
        cell("kappa"),
        cell("output_tokens_per_s", ".1f"),
        _ratio(result.speedup("plain")),
        "baseline" if result.is_baseline else _ratio(result.speedup("full")),
        "-" if result.is_baseline else cell("speedup_vs_full_predicted"),
    ]


def _ratio(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x [{interval.low:.2f}, {interval.high:.2f}]"


def _beats_one(interval: Interval) -> bool | None:
    """True or False where the whole interval is above or below 1, None where it is not."""
    if interval.low is None or interval.high is None:
        return None
    if interval.low > 1:
        return True
    return False if interval.high < 1 else None


def _differs(result: "TrialResult") -> bool:
    return result.metrics.get("output_mismatches", 0) > 0
