"""What the commands on a training config have in common; imports nothing that takes time."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rayspec.config import load_config
from rayspec.job import problem, set_up
from rayspec.messages import first_line
from rayspec.shipped import leaving_nothing

if TYPE_CHECKING:
    from rayspec.training.drafter_config import DrafterTrainConfig

Steps = Callable[[], tuple[Callable[["DrafterTrainConfig"], list[str]], Callable[["DrafterTrainConfig"], Any]]]


def run(command: str, about: str, arguments: list[str], steps: Steps) -> int:
    """Print what would be done, and do it unless `--plan` is given; the command's exit code.

    `steps` imports and returns both: the lines of a plan, and what does it.
    """
    parser = argparse.ArgumentParser(prog=f"rayspec {command}", description=about.split("\n\n")[0])
    parser.add_argument(
        "--config", metavar="FILE", default="configs/train/drafters.yaml", help="YAML of the training (%(default)s)"
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(arguments)
    set_up()
    try:
        from rayspec.training.drafter_config import DrafterTrainConfig

        config = load_config(DrafterTrainConfig, options.config, options.overrides)
        import torch  # a typing error should not wait

        from rayspec.farm.runtime import EngineFailed

        plan, make = steps()
        with leaving_nothing(options.plan):
            print("\n".join(plan(config)), flush=True)
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    if options.plan:
        return 0
    try:
        make(config)
    except (EngineFailed, ChildProcessError, FloatingPointError) as error:  # engines, workers, a gradient
        print(f"error: {error}", file=sys.stderr)
        return 1
    except torch.OutOfMemoryError as error:
        way_out = "raise recipe.accumulate, or train by more workers (workers.count, workers.shard_target)"
        print(f"error: {first_line(error)}; {way_out}; what was made is kept", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {problem(error)}", file=sys.stderr)
        return 2
    return 0
