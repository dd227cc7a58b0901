"""The report of a sweep, from MLflow: rayspec report [--sweep RUN] [--out FOLDER] [--promote] [--emit FOLDER]

Writes report.md and report.html and prints the decision. --promote registers the winner's checkpoint in MLflow's model
registry as champion (or as --alias says; --no-alias leaves aliases where they are), with --once only where it is not
the champion yet; --emit writes the winners' server lines and acceptance for who serves them elsewhere. Exits 0, 1 where
no candidate has earned the promotion, 2 for what cannot be done.
"""

from __future__ import annotations

import argparse
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from rayspec.home import home, tracking_uri
from rayspec.job import set_up

if TYPE_CHECKING:
    from rayspec.report.promote import Promotion
    from rayspec.sweep.record.results import TrialResult
    from rayspec.sweep.record.stored import StoredSweep


def main(arguments: list[str]) -> int:
    """1 says that no candidate has earned it, and is also what Python exits with after a traceback: no build may take
    one for the other."""
    try:
        return _report(arguments)
    except Exception:  # whatever it is, nothing was decided
        traceback.print_exc()
        print("error: the report broke (above)", file=sys.stderr)
        return 2


def _report(arguments: list[str]) -> int:
    options = _options(arguments)
    set_up()
    # imports torch and MLflow; a typing error should not wait for it
    from rayspec.report.page import check_report
    from rayspec.report.promote import PromotionRefused
    from rayspec.sweep.record.stored import find_sweep
    from rayspec.tracking import UNREACHABLE, connect, redacted, said

    try:
        sweep = find_sweep(connect(tracking_uri(), create=False), options.sweep)
        folder = Path(options.out) if options.out else _default_folder(sweep.name, sweep.run_id)
        check_report(folder)
        if options.plan:
            _plan(sweep, folder, options)
        else:
            _write(sweep, folder, options)
    except PromotionRefused as refused:
        print(f"refused: {refused}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except UNREACHABLE as error:
        uri = tracking_uri()
        print(f"error: MLflow at {redacted(uri)} refuses, or cannot answer: {said(error, uri)}", file=sys.stderr)
        return 2
    return 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rayspec report", description=__doc__.split("\n\n")[0])
    parser.add_argument("--sweep", metavar="RUN", help="id or name of its parent run; without it the newest that ended")
    parser.add_argument("--out", metavar="FOLDER", help="where to write; without it reports/ in the home folder")
    parser.add_argument("--promote", action="store_true", help="register the winner's checkpoint as champion")
    parser.add_argument("--model", metavar="NAME", help="registered model; without it drafter-<target>")
    alias = parser.add_mutually_exclusive_group()
    alias.add_argument("--alias", metavar="NAME", help="point this one at the new version, in place of champion")
    alias.add_argument("--no-alias", action="store_true", help="register the version and move no alias")
    parser.add_argument("--traffic", metavar="LABEL", help="promote the winner under this one: c4, r2.5 or x2")
    parser.add_argument("--force", action="store_true", help="promote the best even if it is not clearly faster")
    parser.add_argument("--once", action="store_true", help="register nothing where the winner is the champion already")
    parser.add_argument("--plan", action="store_true", help="say what would be written and registered, and stop")
    parser.add_argument("--emit", metavar="FOLDER", help="write files that serve or simulate the winners elsewhere")
    options = parser.parse_args(arguments)
    for name in ("emit", "out", "model", "alias"):
        if getattr(options, name) == "":
            parser.error(f"--{name} is empty; name one, or leave it out")
    of_promotion = ("model", "alias", "no_alias", "traffic", "force", "once")
    if not options.promote and (named := [name for name in of_promotion if getattr(options, name)]):
        parser.error(f"--{named[0].replace('_', '-')} belongs to --promote; add that, or leave this out")
    if options.once and options.no_alias:
        parser.error("--once goes by what the alias means; leave it or --no-alias out")
    return options


def _plan(sweep: StoredSweep, folder: Path, options: argparse.Namespace) -> None:
    from rayspec.report.decision import decision
    from rayspec.report.promote import check_promotion, default_model

    print(f"{decision(sweep.results)}\n\nto write: {folder}/report.md and report.html")
    found = _to_promote(sweep, options) if options.promote else None  # that none has earned it comes before all else
    if options.emit is not None:
        from rayspec.report.ready_files import winners_of

        names = [best.trial.name for best in winners_of(sweep, Path(options.emit))]
        print(f"to write: what serves {', '.join(names)} elsewhere, to {options.emit}")
    if found is not None:
        best, alias, before = found
        model = options.model or default_model(sweep.params["target"])
        if before is None:
            check_promotion(sweep, best, model, alias)
        meant = f"a version of {model} that no alias means" if alias is None else f"{alias} of {model}"
        print(f"{'already' if before else 'to register as'} {meant}: {best.trial.name}")
        _tell_of_the_policy(sweep, best)


def _write(sweep: StoredSweep, folder: Path, options: argparse.Namespace) -> None:
    from rayspec.report.decision import decision
    from rayspec.report.page import write_report
    from rayspec.report.promote import promote

    markdown, page = write_report(sweep, folder)
    print(decision(sweep.results))
    print(f"\n{markdown}\n{page}")
    source = None
    found = _to_promote(sweep, options) if options.promote else None
    if options.emit is not None:
        from rayspec.report.ready_files import emit, winners_of

        winners_of(sweep, Path(options.emit))  # where this fails, nothing is registered
    if found is not None:
        best, alias, before = found
        done = before or promote(sweep, folder, best, options.model, alias)
        source = done.pinned
        is_now = f"is {'still' if before else 'now'} version {done.version}"
        print(f"{done.uri} {is_now if alias else 'is registered, and no alias means it'}: {best.trial.name}")
        _tell_of_the_policy(sweep, best)
    if options.emit is not None:
        print("\n".join(map(str, emit(sweep, Path(options.emit), source))))


def _to_promote(sweep: StoredSweep, options: argparse.Namespace) -> tuple[TrialResult, str | None, Promotion | None]:
    """The winner, the alias that is to mean it, and with --once the version of it that the alias means already."""
    from rayspec.report.promote import ALIAS, champion_of, winner

    best = winner(sweep.results, options.traffic, options.force)
    alias = None if options.no_alias else options.alias or ALIAS
    return best, alias, champion_of(sweep, best, options.model, alias) if options.once and alias else None


def _tell_of_the_policy(sweep: StoredSweep, best: TrialResult) -> None:
    from rayspec.serving.policy import FEW_BLOCKS, ONE_LOAD, fewest_blocks, has_loads
    from rayspec.statistics import MIN_BLOCKS

    if not has_loads(sweep.results, best):
        print(f"note: {ONE_LOAD}")
    elif (blocks := fewest_blocks(sweep, best)) < MIN_BLOCKS:
        print(f"note: {FEW_BLOCKS.format(blocks=blocks, least=MIN_BLOCKS)}")


def _default_folder(name: str, run_id: str) -> Path:
    return home() / "reports" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', f'{name}-{run_id[:8]}')}"
