"""Does a candidate lose speed or tau: rayspec gate BASELINE CANDIDATE [--max-minutes 10] [key=value ...]

Each side is a drafter (name or folder), a champion (models:/NAME@champion, models:/NAME/VERSION, a run's id), or an
OpenAI-compatible server (http://HOST:PORT/v1). Both answer the same prompts in turn, until the verdict is clear or the
time is over. Keys of servers: RAYSPEC_BASELINE_API_KEY, RAYSPEC_CANDIDATE_API_KEY, or RAYSPEC_API_KEY for both. Exits 0
for a pass, 1 for a regression, 3 where the time did not suffice to tell, 2 for what could not be measured.
"""

import argparse
import shlex
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryFile

from rayspec.config import load_config
from rayspec.gate.sides import MeasureFailed
from rayspec.job import INTERRUPTED, problem, set_up
from rayspec.shipped import leaving_nothing


def main(arguments: list[str]) -> int:
    """1 says regression, and is also what Python exits with after a traceback: no build may take one for the other."""
    try:
        return _gate(arguments)
    except Exception:  # whatever it is, it decided nothing
        traceback.print_exc()
        print("error: the gate broke (above); nothing was decided", file=sys.stderr)
        return 2


def _check_file(file: Path) -> None:
    """Raise ValueError where what is found could not be written, which should not cost ten minutes."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--json {file}: there is no folder {folder}")
    if file.exists() and not file.is_file():
        raise ValueError(f"--json {file}: that is no file; name one that may be replaced")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--json {file}: nothing can be written to {folder} ({error.strerror})") from error


def _gate(arguments: list[str]) -> int:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(prog="rayspec gate", description=__doc__.split("\n\n")[0])
    parser.add_argument("baseline", help="drafter, champion or address of a server")
    parser.add_argument("candidate", help="the same")
    parser.add_argument("--config", metavar="FILE", help="YAML of the gate; defaults alone without it")
    parser.add_argument("--tau-loss", metavar="SHARE", help="of tau whose loss is a regression (0.02)")
    parser.add_argument("--speed-loss", metavar="SHARE", help="of speed whose loss is a regression (0.05)")
    parser.add_argument("--max-minutes", metavar="MINUTES", help="of the whole gate, starts included (10)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything that was found")
    parser.add_argument("--mlflow", action="store_true", help="record it as an MLflow run as well")
    parser.add_argument("--plan", action="store_true", help="check it, say what would be compared, and stop")
    for side in ("baseline", "candidate"):
        parser.add_argument(f"--{side}-model", metavar="NAME", help="which of the server's models, if it has several")
        parser.add_argument(f"--{side}-key-file", metavar="FILE", help="holds the key of the server")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()
    named = {name: getattr(options, name) for name in ("tau_loss", "speed_loss", "max_minutes")}
    overrides = [*options.overrides, *(f"{name}={value}" for name, value in named.items() if value is not None)]

    try:
        from rayspec.gate.config import GateConfig

        config = load_config(GateConfig, options.config, overrides)
        if options.json is not None:
            _check_file(options.json)
        from rayspec.gate.report import as_json, text, track
        from rayspec.gate.run import EndpointOptions, planned, run_gate, status
        from rayspec.home import prepared_home, tracking_uri
        from rayspec.provenance import provenance
        from rayspec.tracking import connect
        from sglang_ext.whole import write_whole

        sides = [
            EndpointOptions(model=getattr(options, f"{side}_model"), key_file=getattr(options, f"{side}_key_file"))
            for side in ("baseline", "candidate")
        ]
        if options.plan:
            with leaving_nothing(True):
                print(planned(config, (options.baseline, options.candidate), sides))
            return 0
        prepared_home()
        if options.mlflow:
            connect(tracking_uri())  # a store that does not answer should not cost ten minutes
        deadline = begin + 60 * config.max_minutes
        finding, gate = run_gate(config, (options.baseline, options.candidate), sides, deadline)
        report, command, tags = text(finding), shlex.join(["rayspec", "gate", *arguments]), provenance()
        print(report)
        if options.json is not None:
            write_whole(options.json, as_json(finding, gate, command, tags))
        if options.mlflow:
            print(f"MLflow run {track(finding, gate, report, command, tags)}")
    except (ValueError, OSError, MeasureFailed) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return status(finding.verdict)
