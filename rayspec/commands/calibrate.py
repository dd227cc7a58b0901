"""What reduced heads keep: rayspec calibrate --config configs/calibrate/smollm2.yaml [key=value ...] [--plan]

Counts the tokens of every source, then makes every calibration of the config. The same command goes on after an
interruption. Exits 0 when every calibration is there, 2 for a config that cannot run.
"""

import argparse
import shlex
import sys

from rayspec.config import load_config
from rayspec.job import problem, set_up
from rayspec.shipped import leaving_nothing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec calibrate", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--config", metavar="FILE", default="configs/calibrate/smollm2.yaml", help="YAML of the job (%(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()

    try:
        from rayspec.calibration.config import CalibrationConfig  # imports torch

        config = load_config(CalibrationConfig, options.config, options.overrides)
        from rayspec.calibration.prepare import describe, prepare  # reads the target; a typing error should not wait

        with leaving_nothing(options.plan):
            prepared = prepare(config)
            print("\n".join(describe(prepared)), flush=True)
        if not options.plan:
            from rayspec.calibration.runs import calibrate_all

            calibrate_all(prepared, shlex.join(["rayspec", "calibrate", *arguments]))
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
