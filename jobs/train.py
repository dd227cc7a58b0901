"""Train draft heads: python jobs/train.py --config configs/train/drafters.yaml [key=value ...] [--plan]

Makes the target's answers where they are missing, then trains and exports every head of the config. The same command
continues after an interruption. Exits 0 when every drafter is exported, 2 for a config that cannot run.
"""

import argparse
import signal
import sys
from types import FrameType

from rayspec.config import load_config


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="jobs/train.py", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", metavar="FILE", default="configs/train/drafters.yaml", help="YAML of the training")
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    signal.signal(signal.SIGTERM, _terminate)  # `ray job stop`: close the tracking run as Ctrl-C does

    try:
        from rayspec.training.drafter_config import DrafterTrainConfig

        config = load_config(DrafterTrainConfig, options.config, options.overrides)
        from rayspec.training.drafter_runs import plan, train_all  # imports torch; a typing error should not wait

        print("\n".join(plan(config)), flush=True)
        if not options.plan:
            train_all(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
