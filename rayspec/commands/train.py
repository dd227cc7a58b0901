"""Train draft heads: rayspec train --config configs/train/drafters.yaml [key=value ...] [--plan]

Makes the target's answers where they are missing, then trains and exports every head of the config. The same command
continues after an interruption. Exits 0 when every drafter is exported, 1 where engines cannot answer, 2 for a config
that cannot run.
"""

import argparse
import sys

from rayspec.config import load_config
from rayspec.job import problem, set_up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", default="configs/train/drafters.yaml", help="YAML of the training")
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()

    try:
        from rayspec.training.drafter_config import DrafterTrainConfig

        config = load_config(DrafterTrainConfig, options.config, options.overrides)
        from rayspec.farm.runtime import EngineFailed  # imports torch; a typing error should not wait
        from rayspec.training.drafter_runs import plan, train_all

        print("\n".join(plan(config)), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    if options.plan:
        return 0
    try:
        train_all(config)
    except EngineFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
