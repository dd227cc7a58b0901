"""Every head, drafter and tree in an engine of its own, and what the costs say: with the accepted length that one has
elsewhere, how much faster than plain decoding it is at each batch."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rayspec.engine_suite.models import SHAPES, Drafting, draftings, write_drafter, write_target
from rayspec.engine_suite.process import EngineProcess
from sglang_ext import DRAFT_STEPS
from sglang_ext.whole import write_whole

PLAIN = "plain"
LIMIT_S = 240
ACCEPTED = 3  # tokens of a step, held fixed; what a step costs does not depend on it

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # by engine, one a batch


def measure_engines(
    shape: str,
    drafting: Sequence[str],
    *,
    batches: Sequence[int],
    save: Callable[[dict[str, Any]], None],
    limit_s: float = LIMIT_S,
    at_once: int = 1,
    server_args: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """{rows: {engine: its rows}, failed: {engine: what went wrong}} of plain decoding and of these `draftings`. `save`
    is given what there is after every engine, so that whatever ends the run, its results stay.

    `server_args` are fields of SGLang's ServerArgs, of every engine.

    `at_once` engines start side by side, so that a card must hold as many, and are then measured one after the other
    while the others idle: of an engine's minutes most are its start. `limit_s` is for a start, and again for measuring.
    """
    model, known = SHAPES[shape], draftings(SHAPES[shape])
    found: dict[str, Any] = {"shape": shape, "draft_steps": DRAFT_STEPS, "accepted": ACCEPTED, "rows": {}, "failed": {}}
    names = [PLAIN, *drafting]
    with tempfile.TemporaryDirectory(prefix="rayspec-") as place, tqdm(total=len(names), desc="engines") as bar:
        target = Path(place) / "target"
        write_target(target, model)
        for first in range(0, len(names), at_once):
            group = names[first : first + at_once]
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
                engines: dict[str, EngineProcess] = {}
                for name in group:
                    drafter = None if name == PLAIN else folder / name
                    try:
                        if drafter is not None:
                            write_drafter(drafter, model, known[name])
                        command = _command(target, drafter, known.get(name), model.vocab, batches)
                        command += ["--server-args", json.dumps(dict(server_args or {}))]
                        engines[name] = stack.enter_context(EngineProcess(command, limit_s, accepted=ACCEPTED))
                    except Exception as error:  # a head too large for the card, say: the others are worth having
                        found["failed"][name] = f"{type(error).__name__}: {error}"
                for engine in engines.values():
                    engine.wait_until_up()
                for name in group:
                    if name in engines:
                        try:
                            found["rows"][name] = engines[name].measure()
                        except RuntimeError as error:
                            found["failed"][name] = f"RuntimeError: {error}"
                    save(found)
                    bar.update()
    return found


def _command(
    target: Path, drafter: Path | None, drafting: Drafting | None, vocab: int, batches: Sequence[int]
) -> list[str]:
    command = [sys.executable, "-m", "rayspec.engine_suite.steps", str(target), "--vocab", str(vocab)]
    command += ["--draft-steps", str(DRAFT_STEPS), "--batches", *map(str, batches)]
    if drafter is None or drafting is None:
        return command
    command += ["--drafter", str(drafter), "--topk", str(drafting.topk)]
    return command + (["--nodes", str(drafting.nodes)] if drafting.nodes else [])


def speedup(row: Mapping[str, Any], plain: Mapping[str, Any], tau: float) -> float:
    """Speed-up over plain decoding of a head that emits `tau` tokens a step."""
    return float(tau * plain["step_ms"] / row["step_ms"])


def table(found: Mapping[str, Any]) -> list[str]:
    """Markdown. `break-even`: tokens of a step from which on a head is faster than plain decoding. `found["tau"]`: of
    some heads the tokens of a step that trained drafters reach, from which their speed-up is predicted."""
    lines = [
        f"Shape {found['shape']}, random weights, {found['draft_steps']} draft steps{_trees(found)}, "
        f"{found['accepted']} tokens of each step accepted whatever the drafts are. Milliseconds of a step; of it "
        "head: the head alone, on a GPU as a graph is replayed.",
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
        f"\n{name} scored {row['shortlist_mean']:.0f} tokens for a row at batch {row['batch']}, in the mean."
        for name, rows in found["rows"].items()
        for row in rows
        if "shortlist_mean" in row
    ]
    lines += [
        f"\nThe head of {name} alone was not timed: {row['head_error']}"
        for name, rows in found["rows"].items()
        for row in rows
        if "head_error" in row
    ]
    lines += _backends(found["rows"])
    lines += [f"\n{name} failed:\n```\n{output}\n```" for name, output in found["failed"].items()]
    return lines


def _backends(rows: Rows) -> list[str]:
    """SGLang's own choice, of all engines or of each; nothing where results are older than this."""
    used: dict[str, list[str]] = {}
    for name, own in rows.items():
        if own and "backends" in own[0]:
            what = ", ".join(f"{field} {value}" for field, value in own[0]["backends"].items())
            used.setdefault(what, []).append(name)
    return [f"\n{what} ({'all engines' if len(used) == 1 else ', '.join(names)})." for what, names in used.items()]


def _trees(found: Mapping[str, Any]) -> str:
    """Which of the engines draft trees."""
    known = draftings(SHAPES[found["shape"]])
    trees = [f"{name} {known[name].nodes}" for name in found["rows"] if name in known and known[name].topk > 1]
    return f", chains but for trees of so many nodes: {', '.join(trees)}" if trees else " in a chain"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw by batch the tokens a step at which each engine breaks even, and its predicted speed-up for a known tau."""
    from rayspec.plotting import PALETTE, STYLE, colour, legend_below, marker, panels, plt

    plain = {row["batch"]: row for row in found["rows"][PLAIN]}
    taus = found.get("tau", {})
    with plt.rc_context(STYLE):
        figure, axes = panels(2 if taus else 1, width=5.5, height=4)
        entries = []
        for i, (name, rows) in enumerate((n, r) for n, r in found["rows"].items() if n != PLAIN):
            batches = [row["batch"] for row in rows]
            per_token = [speedup(row, plain[row["batch"]], 1) for row in rows]
            style = f"{marker(i + i // len(PALETTE))}-"  # colours come again
            (line,) = axes[0].plot(batches, [1 / gain for gain in per_token], style, color=colour(i))
            entries.append((line, f"{name}, tau {taus[name]:g}" if name in taus else name))
            if name in taus:
                axes[1].plot(batches, [taus[name] * gain for gain in per_token], style, color=colour(i))
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.axhline(1, color="0.6", linewidth=0.8)
            axis.set(xlabel="batch", ylabel="predicted speed-up")
        axes[0].set(ylabel="tokens a step to break even", ylim=(1, None))
        legend_below(figure, entries, columns=4)
        figure.savefig(path, dpi=150)


def write_curves(found: Mapping[str, Any], folder: Path) -> None:
    """engines.json, engines.md, and engines.png where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "engines.json", json.dumps(found, indent=1))
    made_by = [f"- {name}: {value}" for name, value in found["provenance"].items()]
    write_whole(
        folder / "engines.md",
        "\n".join(["# Draft heads and drafters in SGLang", "", *made_by, "", *table(found)]) + "\n",
    )
    with contextlib.suppress(ImportError):
        if PLAIN in found["rows"] and len(found["rows"]) > 1:
            draw(found, folder / "engines.png")
