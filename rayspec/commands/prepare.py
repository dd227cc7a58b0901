"""Make what drafters are trained on: rayspec prepare --config configs/train/drafters.yaml [key=value ...] [--plan]

Makes the target's answers where they are missing and, with hidden_states=offline, stores its hidden states along them:
what rayspec train with the same config would do first. The same command continues after an interruption. Exits 0 when
all is there, 1 where engines cannot answer, 2 for a config that cannot run.
"""

import argparse
import sys

from rayspec.config import load_config
from rayspec.job import problem, set_up


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="rayspec prepare", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", default="configs/train/drafters.yaml", help="YAML of the training")
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()

    try:
        from rayspec.training.drafter_config import DrafterTrainConfig

        config = load_config(DrafterTrainConfig, options.config, options.overrides)
        from rayspec.farm.runtime import EngineFailed  # imports torch; a typing error should not wait
        from rayspec.training.prepare import plan_prepare, prepare

        print("\n".join(plan_prepare(config)), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    if options.plan:
        return 0
    try:
        prepare(config)
    except EngineFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
