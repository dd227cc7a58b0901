"""The report of a sweep as Markdown, from what MLflow holds and nothing else."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rayspec.plotting import attempt, save_figures
from rayspec.report.categories import category_speedups, prompt_counts
from rayspec.report.decision import choices, decision, enumeration, ratio, verdict
from rayspec.report.figures import sweep_figures
from rayspec.report.head_figures import prediction_error
from rayspec.report.html import to_html
from rayspec.report.speed_figures import bounds, category_speedup_figure
from rayspec.report.table import busy, latency_table, mismatches, notes, results_table
from rayspec.serving.flags import serve_command
from rayspec.statistics import Interval, beats_one
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import TrialResult
from rayspec.sweep.record.stored import StoredSweep
from rayspec.tables import render_table
from rayspec.tracking import redacted
from sglang_ext.whole import write_whole

FIGURES = "figures"
HEADING = re.compile("^# Sweep ", re.MULTILINE)
CAPTIONS = {
    "speedup": "Speed-up over plain decoding, with 95% intervals. One that meets the dashed line settles nothing.",
    "speedup_by_load": "Speed-up by load: below the dashed line speculation costs more than it brings.",
    "speedup_by_budget": "Speed-up by what a step verifies: more nodes are accepted more often and cost more.",
    "pareto": "What a user waits for a token against what the machine delivers. On the grey line no trial is beaten in "
    "both.",
    "speedup_by_category": "The chosen trials by prompt category: tokens per second of a request, end to end.",
    "head_tradeoff": "tau kept (rho) against head latency kept (nu). In the shaded part a head should be faster than "
    "the baseline; thin lines are of equal predicted speed-up, rho (1 + kappa) / (1 + nu kappa); on the dotted line no "
    "head is beaten in both.",
    "tau_by_shortlist": "tau kept (rho) against the tokens that the head scored for a row, in the mean over rows and "
    "draft positions. Truncations and routed heads compare at equal mean size.",
    "by_option": "tau and speed-up over plain decoding, with 95% intervals, against an option of the head, along heads "
    "that differ in nothing else; dotted is the baseline.",
    "prediction": "Measured speed-up over the baseline against the one that rho, nu and kappa predict; on the dashed "
    "line they agree.",
    "work": "What a verify step yields against what a token costs in multiplications.",
    "acceptance": "Acceptance: tau, and the share of verify steps that accept at least i drafts.",
    "tau_by_category": "tau by prompt category; a category of few prompts is noisy.",
}


def check_report(folder: Path) -> None:
    """Raise ValueError where a report would replace somebody else's file."""
    file = folder / "report.md"
    if file.is_symlink() or (file.exists() and not HEADING.search(file.read_text(errors="replace"))):
        raise ValueError(
            f"{file} is no report of a sweep, and is not replaced: move it away, or name another folder with --out"
        )


def write_report(sweep: StoredSweep, folder: Path) -> tuple[Path, Path]:
    """Write report.md with its figures/ and report.html, which holds everything, into `folder`; returns the two."""
    pictures = folder / FIGURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name in CAPTIONS:  # figures of an earlier report
        for suffix in (".png", ".svg"):
            (pictures / f"{name}{suffix}").unlink(missing_ok=True)
    speedups, counts = chosen_category_speedups(sweep)
    figures = sweep_figures(sweep.results, sweep.requests)
    if any(len(own) > 1 for own in speedups.values()):
        by_category = attempt("speedup_by_category", partial(category_speedup_figure, speedups, counts))
        figures |= {"speedup_by_category": by_category} if by_category else {}
    drawn = {file.stem for file in save_figures(figures, pictures)}
    text = markdown(sweep, [name for name in figures if name in drawn], speedups)
    page = to_html(text, f"{sweep.name}: sweep report", folder, {f"{FIGURES}/{name}.svg" for name in drawn})
    for name, content in (("report.md", text), ("report.html", page)):
        write_whole(folder / name, content)
    return folder / "report.md", folder / "report.html"


def chosen_category_speedups(sweep: StoredSweep) -> tuple[dict[str, dict[str, Interval]], dict[str, int]]:
    """{trial: {category: speed-up over plain decoding}} of the trial that was chosen under each traffic, and how many
    prompts each category has."""
    measured = {r.trial for r in sweep.results if r.error is None}
    speedups: dict[str, dict[str, Interval]] = {}
    counts: dict[str, int] = {}
    for choice in choices(sweep.results):
        plain = Trial(candidate=None, traffic=choice.traffic)
        if choice.best is not None and plain in measured:
            base = sweep.requests(plain)
            speedups[choice.best.trial.name] = category_speedups(sweep.requests(choice.best.trial), base)
            counts |= prompt_counts(base)
    return speedups, counts


def markdown(sweep: StoredSweep, figures: Sequence[str], speedups: Mapping[str, Mapping[str, Interval]]) -> str:
    """The whole report; `figures` are the names of those that lie in figures/."""
    r = sweep.results
    tell = "\n".join(f"- {verdict(choice)}" for choice in choices(r))
    pictures = {name: f"![{CAPTIONS[name]}]({FIGURES}/{name}.svg)" for name in figures}

    def show(*names: str) -> list[str]:
        return [pictures[name] for name in names if name in pictures]

    sections = [
        f"**{decision(r)}**",
        f"**{busy(r)}**" if busy(r) else "",
        f"# Sweep {sweep.name}",
        _setup(sweep),
        tell,
        *show("speedup", "speedup_by_load", "speedup_by_budget", "pareto"),
        _serve(sweep),
        "## Where speculation hurts",
        hurts(r, speedups),
        *show("speedup_by_category"),
        "## Why: the head's trade-off",
        _prediction(r),
        *show("head_tradeoff", "by_option", "prediction"),
        "## Acceptance",
        *show("acceptance", "tau_by_category", "work"),
        "## All trials",
        results_table(r),
        *_failures(r),
        notes(r),
        mismatches(r),
        "## What a user waits for",
        latency_table(r),
        "## Provenance",
        _provenance(sweep),
        f"```yaml\n{sweep.config_yaml().strip()}\n```",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def hurts(results: Sequence[TrialResult], speedups: Mapping[str, Mapping[str, Interval]]) -> str:
    """The settings and categories that are slower than plain decoding: beyond doubt, and by their estimate."""
    drafted = [(r, interval) for r in results if (interval := r.speedup("plain")) is not None]
    clearly = [(r, i) for r, i in drafted if beats_one(i) is False]
    seemingly = [r for r, i in drafted if beats_one(i) is None and i.value < 1]
    lines = []
    if clearly:
        lines.append("Slower than plain decoding, the whole interval below 1:")
        lines.append("\n".join(f"- {r.trial.name}: {ratio(i)}" for r, i in sorted(clearly, key=lambda p: p[1].value)))
    else:
        lines.append("No trial is slower than plain decoding beyond doubt.")
    if seemingly:
        lines.append(
            f"Estimated slower, with an interval that includes 1: {', '.join(r.trial.name for r in seemingly)}."
        )
    for trial, own in speedups.items():
        bad = [f"{name} {ratio(i)}" for name, i in own.items() if beats_one(i) is False]
        below = sum(i.value < 1 for i in own.values())
        if len(own) > 1:
            text = f"By category, {trial} is slower beyond doubt on " + (", ".join(bad) if bad else "no category")
            lines.append(f"{text}; its estimate is below 1 in {below} of {len(own)}.")
    return "\n\n".join(lines)


def _prediction(results: Sequence[TrialResult]) -> str:
    """How far the predicted speed-up over the baseline is from the measured one."""
    pairs = [(error, r) for r in results if not r.is_baseline and (error := prediction_error(r)) is not None]
    if not pairs:
        return (
            "No prediction: it needs the baseline in the same sweep, `head_latency: true`, and engines without tensor "
            "parallelism."
        )
    worst, who = max(pairs, key=lambda pair: abs(pair[0]))
    mean = sum(abs(error) for error, _ in pairs) / len(pairs)
    covered = sum(low <= r.metrics["speedup_vs_baseline_predicted"] <= high for r, low, high in _with_bounds(pairs))
    return (
        f"Prediction error (predicted over measured speed-up over {pairs[0][1].baseline}, minus 1): {mean:.1%} on "
        f"average of absolute values over {len(pairs)} trials, {worst:+.1%} at worst ({who.trial.name}). The "
        f"measured 95% interval holds the prediction in {covered} of {len(pairs)}."
    )


def _with_bounds(pairs: Sequence[tuple[float, TrialResult]]) -> list[tuple[TrialResult, float, float]]:
    intervals = [(r, interval) for _, r in pairs if (interval := r.speedup("baseline")) is not None]
    return [(r, *bounds(interval)) for r, interval in intervals]


def _failures(results: Sequence[TrialResult]) -> list[str]:
    failed = [r for r in results if r.error]
    if not failed:
        return []
    items = [f"- {r.trial.name}: `{r.error.splitlines()[0].replace('`', '')}`" for r in failed if r.error]
    return [f"### Failed trials ({len(failed)} of {len(results)})", "\n".join(items)]


def _setup(sweep: StoredSweep) -> str:
    p = sweep.params
    loads = sorted({replace(r.trial.traffic, temperature=None) for r in sweep.results})
    failed = sum(r.error is not None for r in sweep.results)
    traced = f" at the times of the trace {p['trace.path']}" if "trace.path" in p else ""
    longest = f"up to {p['max_new_tokens']} tokens an answer" + (" where the trace does not say" if traced else "")
    return (
        f"Target {p['target']}, workload {p['workload']}{traced}, {longest} at temperature "
        f"{p['temperature']}; {len(sweep.results)} trials ({failed} failed) at {enumeration(loads)}. "
        f"Measured {_time(sweep.parent.info.start_time)} on {sweep.tags.get('host.cpu', 'an unknown CPU')}"
        f"{_gpu(sweep)}."
    )


def _gpu(sweep: StoredSweep) -> str:
    gpu = sweep.tags.get("host.gpu", "none")
    return " without a GPU" if gpu == "none" else f" with {gpu}"


def _serve(sweep: StoredSweep) -> str:
    """How to serve what the decision names: a command for each setting, and plain decoding where none pays."""
    made = [c for c in choices(sweep.results) if c.best is not None]
    paying = {c.best.trial.name.removesuffix(f"-{c.traffic.label}"): c.best.trial for c in made if c.pays and c.best}
    if not made:
        return ""
    if not paying:
        plain = Trial(candidate=None, traffic=made[0].traffic)
        return f"## Serve it\n\nWithout speculation:\n\n```\n{serve_command(sweep, plain)}\n```"
    commands = [f"`{name}`:\n\n```\n{serve_command(sweep, trial)}\n```" for name, trial in paying.items()]
    return "\n\n".join(["## Serve it", *commands])


def _provenance(sweep: StoredSweep) -> str:
    info, tags = sweep.parent.info, sweep.tags
    versions = [f"{k.removeprefix('version.')} {v}" for k, v in tags.items() if k.startswith("version.")]
    machine = [f"{k.removeprefix('host.')} {v}" for k, v in tags.items() if k.startswith("host.")]
    dirty = {"true": " (with uncommitted changes)", "unknown": " (state of the checkout unknown)"}
    rows = [
        ["command", f"`{tags.get('command', 'unknown')}`"],
        ["commit", tags.get("git.commit", "unknown") + dirty.get(tags.get("git.dirty", ""), "")],
        ["began, ended", f"{_time(info.start_time)}, {_time(info.end_time)} ({info.status})"],
        ["versions", ", ".join(versions)],
        ["machine", ", ".join(machine)],
        ["MLflow", f"{redacted(sweep.client.tracking_uri)}, run {sweep.run_id}"],
        *[["dataset", f"{d.name}, digest {d.digest}, {d.profile or ''}"] for d in sweep.datasets],
    ]
    return render_table(["what", "value"], [[a, _cell(b)] for a, b in rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _time(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "-"
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
