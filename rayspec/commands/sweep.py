"""Sweep draft heads: rayspec sweep --config configs/sweep/demo.yaml [key=value ...] [--plan] [--once] | --resume [RUN]

--resume goes on with a sweep that was cut off, by anything: what was measured is not measured again. --once does so by
itself where there is one of the same settings, and measures nothing where one has ended. Also what
`ray job submit --working-dir . -- rayspec sweep ...` runs. Exits 0 when every trial succeeded, 1 when one
failed, 2 for a config that cannot run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from rayspec.config import load_config
from rayspec.home import home, prepared_home, tracking_uri
from rayspec.job import INTERRUPTED, problem, set_up
from rayspec.shipped import leaving_nothing
from rayspec.sweep.config import SweepConfig

if TYPE_CHECKING:
    from rayspec.sweep.plan.prepare import Prepared
    from rayspec.sweep.record.folder import SweepFolder


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    set_up()
    try:
        with leaving_nothing(options.plan):
            found = _begin(options, arguments)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0 if found is None else _run(*found)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rayspec sweep", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", help="YAML of the sweep; defaults alone without it")
    parser.add_argument("--plan", action="store_true", help="print the trials and stop")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        nargs="?",
        const="",
        help="go on with this sweep (id, MLflow run id or name), or with the newest that did not end",
    )
    parser.add_argument(
        "--once", action="store_true", help="go on with a sweep of these settings; nothing to do where one has ended"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    if options.resume is not None and (options.config or options.overrides or options.plan or options.once):
        parser.error(
            "--resume takes the stored config of the sweep; no --config, --plan, --once or key=value beside it"
        )
    return options


def _begin(options: argparse.Namespace, arguments: list[str]) -> tuple[Prepared, SweepFolder] | None:
    """What there is to measure, and the folder that says what was measured; None where the plan was all, or a sweep of
    these settings has ended. Raises ValueError and OSError."""
    config = load_config(SweepConfig, options.config, options.overrides) if options.resume is None else None
    # imports torch; a typing error should not wait for it
    from rayspec.sweep.plan.prepare import prepare
    from rayspec.sweep.plan.sampling import check_drafts_are_said
    from rayspec.sweep.record.folder import SweepFolder, find_resumable, find_same

    begun = None
    if config is None:
        begun = find_resumable(prepared_home(), options.resume or None)
    elif options.once:
        begun = find_same(home(), config)
        if begun is not None and begun.is_ended:
            print(f"{begun.id} has ended with these settings: nothing to measure")
            return None
    if begun is not None:
        prepared = prepare(begun.config())
        if not options.plan:
            prepared.make_heads()
            begun.check(prepared)
        print(f"resuming {begun.id}")
    else:
        assert config is not None, "without --resume there is one"
        prepared = prepare(config)
        check_drafts_are_said(config, prepared.plan.candidates)  # one that began before this was asked goes on
    print(prepared.describe(), flush=True)
    if options.plan:
        return None
    # imports Ray and MLflow, which a plan does without; before the folder is made, so that Ctrl-C finds none
    import rayspec.driver.controller  # noqa: F401
    from rayspec.tracking import connect

    if begun is None:
        place = prepared_home()
        connect(tracking_uri())  # a store that does not answer leaves no sweep behind that could go on
        prepared.make_heads()
        begun = SweepFolder.create(place, prepared, shlex.join(["rayspec", "sweep", *arguments]))
    return prepared, begun


def _run(prepared: Prepared, folder: SweepFolder) -> int:
    from rayspec.driver.controller import SweepStopped, resume_command, run_sweep
    from rayspec.farm.runtime import EngineFailed
    from rayspec.tracking import how_to_look

    try:
        outcome = run_sweep(prepared, folder)
    except EngineFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, SweepStopped) as error:  # from tracking, a sweep that runs, or what stopped this one
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as error:
        print(f"cut off; to go on: {resume_command(folder)}", file=sys.stderr)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else int(error.code or 0)
    print(f"\n{outcome.summary}\n")
    print(f"Look at it: {how_to_look(outcome.tracking_uri)}   (run {outcome.parent_run_id})")
    print(f"Report: rayspec report --sweep {outcome.parent_run_id}")
    if outcome.failed:
        print(f"{len(outcome.failed)} of {len(outcome.results)} trials failed", file=sys.stderr)
        return 1
    return 0
