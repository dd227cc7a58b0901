"""Every head in an engine of its own, and what the costs say: with the accepted length that a head reaches elsewhere,
how much faster than plain decoding it is at each batch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rayspec.engine_suite.models import SHAPES, head_specs, write_drafter, write_target
from rayspec_kernels.common.report import write_whole

PLAIN = "plain"
ACCEPTED = 3  # tokens of a step, held fixed; what a step costs does not depend on it

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by engine, one a batch


def measure_engines(
    shape: str,
    heads: Sequence[str],
    *,
    batches: Sequence[int],
    save: Callable[[dict[str, Any]], None],
    draft_steps: int = 4,
    limit_s: float = 240,
) -> dict[str, Any]:
    """{rows: {engine: its rows}, failed: {engine: what went wrong}} of plain decoding and of each head. `save` is given
    what there is after every engine, so that whatever ends the run, its results stay."""
    model, specs = SHAPES[shape], head_specs(SHAPES[shape])
    found: dict[str, Any] = {"shape": shape, "draft_steps": draft_steps, "accepted": ACCEPTED, "rows": {}, "failed": {}}
    with tempfile.TemporaryDirectory(prefix="rayspec-") as folder:
        target = Path(folder) / "target"
        write_target(target, model)
        for name in tqdm([PLAIN, *heads], desc="engines"):
            drafter = None if name == PLAIN else Path(folder) / "drafter"
            command = [sys.executable, "-m", "rayspec.engine_suite.steps", str(target), "--vocab", str(model.vocab)]
            command += ["--draft-steps", str(draft_steps), "--batches", *map(str, batches)]
            command += ["--drafter", str(drafter)] if drafter is not None else []
            try:
                if drafter is not None:
                    write_drafter(drafter, model, specs[name])
                found["rows"][name] = _run(command, limit_s)
            except Exception as error:  # of a head too large for the card, say: the others are worth having
                found["failed"][name] = f"{type(error).__name__}: {error}"
            save(found)
    return found


def _run(command: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Its answer; RuntimeError with the end of its log if it gives none. Whatever it started ends with it."""
    path = os.pathsep.join(filter(None, sys.path))  # the suite runs from a copy of the files, without an installation
    environment = {**os.environ, "SGLANG_SIMULATE_ACC_LEN": str(ACCEPTED), "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile("r") as answer:
        process = subprocess.Popen(
            [*command, "--out", answer.name], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status: int | str = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            status = f"none within {limit_s} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if status != 0:
            log.seek(0)
            raise RuntimeError("\n".join([f"exit status {status}", *log.read().splitlines()[-30:]]))
        return json.load(answer)


def speedup(row: Mapping[str, Any], plain: Mapping[str, Any], tau: float) -> float:
    """Over plain decoding of a head that emits `tau` tokens a step."""
    return float(tau * plain["step_ms"] / row["step_ms"])


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown. `break-even`: tokens of a step from which on a head is faster than plain decoding. `found["tau"]`: of
    some heads the tokens of a step that trained drafters reach, from which their speed-up is predicted."""
    lines = [
        f"Shape {found['shape']}, random weights, chains of {found['draft_steps']} drafts, "
        f"{found['accepted']} tokens of each step accepted whatever the drafts are. Milliseconds of a step.",
        "",
        "| engine | B | step | drafting | of it head | verification | between steps | break-even tau | tau elsewhere "
        "| predicted speed-up |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    taus = found.get("tau", {})
    plain = {row["batch"]: row for row in found["rows"].get(PLAIN, [])}
    for name, rows in found["rows"].items():
        for row in rows:
            parts, least, tau, predicted = ["", "", "", ""], "", taus.get(name, ""), ""
            if "draft_ms" in row:
                between = row["step_ms"] - row["draft_ms"] - row["verify_ms"]
                parts = [f"{row[k]:.2f}" if k in row else "?" for k in ("draft_ms", "head_ms", "verify_ms")]
                parts.append(f"{between:.2f}")
                if row["batch"] in plain:
                    least = f"{1 / speedup(row, plain[row['batch']], 1):.2f}"
                    predicted = f"{speedup(row, plain[row['batch']], tau):.2f}" if tau else ""
            cells = [name, str(row["batch"]), f"{row['step_ms']:.2f}", *parts, least, str(tau), predicted]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        f"\nThe head of {name} alone was not timed: {row['head_error']}"
        for name, rows in found["rows"].items()
        for row in rows
        if "head_error" in row
    ]
    lines += [f"\n{name} failed:\n```\n{output}\n```" for name, output in found["failed"].items()]
    return lines


def draw(found: Mapping[str, Any], path: Path) -> None:
    """By batch, tokens of a step at which each head breaks even, and the predicted speed-up where its tau is known."""
    from rayspec.plotting import STYLE, colour, panels, plt

    plain = {row["batch"]: row for row in found["rows"][PLAIN]}
    taus = found.get("tau", {})
    with plt.rc_context(STYLE):
        figure, axes = panels(2 if taus else 1, width=5.5, height=4)
        for i, (name, rows) in enumerate((n, r) for n, r in found["rows"].items() if n != PLAIN):
            batches = [row["batch"] for row in rows]
            per_token = [speedup(row, plain[row["batch"]], 1) for row in rows]
            axes[0].plot(batches, [1 / gain for gain in per_token], "o-", color=colour(i), label=name)
            if name in taus:
                label = f"{name}, tau {taus[name]:g}"
                axes[1].plot(batches, [taus[name] * gain for gain in per_token], "o-", color=colour(i), label=label)
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.axhline(1, color="0.6", linewidth=0.8)
            axis.set(xlabel="batch", ylabel="predicted speed-up")
            axis.legend(fontsize=8)
        axes[0].set(ylabel="tokens a step to be as fast as plain decoding", ylim=(1, None))
        figure.savefig(path, dpi=150)


def write_curves(found: Mapping[str, Any], folder: Path) -> None:
    """engines.json, engines.md, and engines.png where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "engines.json", json.dumps(found, indent=1))
    made_by = [f"- {name}: {value}" for name, value in found["provenance"].items()]
    write_whole(folder / "engines.md", "\n".join(["# Draft heads in SGLang", "", *made_by, "", *table(found)]) + "\n")
    with contextlib.suppress(ImportError):
        if PLAIN in found["rows"] and len(found["rows"]) > 1:
            draw(found, folder / "engines.png")
